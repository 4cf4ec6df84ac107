"""The files of the ranks of one machine, on the command line."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import planner
from planner.errors import FileFormatError
from planner.schema import printable, read_format
from teraio.cli.arguments import SharedTier

__all__ = ["RANK", "RankFiles", "plan_paths"]

RANK = "{rank}"
"""Stands for the number of the rank in the name of an output file."""
File = TypeVar("File", planner.Trace, planner.Plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The node, the trace of each rank, and the plan of each rank or none."""

    node: planner.Node
    traces: tuple[planner.Trace, ...]
    plans: tuple[planner.Plan, ...]

    @classmethod
    def read(cls, files: Sequence[Path], node: Path | None, shared: Collection[SharedTier]) -> RankFiles:
        """Read traces and plans, each kind in the order of the ranks.

        One trace is that of every rank of the node, and one plan is for all ranks. Raises OptionsError where the numbers do not
        fit, and the errors of the files.
        """
        traces, plans = [], []
        for path in files:
            found = read_format(path)
            if found == "teraio.plan":
                plans.append(planner.Plan.load(path))
            elif found == "teraio.trace":
                traces.append(planner.Trace.load(path))
            else:
                shown = repr(found and printable(found, most=60))
                raise FileFormatError(f"{path}: field 'format' is {shown}; --ranks takes traces and plans")
        if not traces:
            raise planner.OptionsError("option --ranks: found no trace; give the trace of each rank")
        if node is not None and shared:
            raise planner.OptionsError("options --node and --shared: the file says what is shared; leave one of them out")
        known = None if node is None else planner.Node.load(node)
        every = _one_each("traces", traces, len(traces) if known is None else known.ranks)
        return cls(
            node=known or planner.node_of(every, [tier.value for tier in shared]),
            traces=every,
            plans=_one_each("plans", plans, len(every)) if plans else (),
        )

    def refuse_plans(self) -> None:
        """Raise OptionsError if there are plans among the files."""
        if self.plans:
            raise planner.OptionsError(
                "option --ranks: found plans; this command takes traces only, 'teraio simulate' takes both"
            )

    def needed_plans(self) -> tuple[planner.Plan, ...]:
        """Return the plans. Raises OptionsError if there are none."""
        if not self.plans:
            raise planner.OptionsError("option --ranks: found no plan; give the plan of each rank, or one for all of them")
        return self.plans


def _one_each(what: str, found: Sequence[File], ranks: int) -> tuple[File, ...]:
    if len(found) not in (1, ranks):
        raise planner.OptionsError(f"option --ranks: found {len(found)} {what} for {ranks} ranks; give one each, or one for all")
    return tuple(found) if len(found) == ranks else tuple(found) * ranks


def plan_paths(output: Path | None, traces: Sequence[planner.Trace]) -> list[Path]:
    """Return where the plan of each rank is written: one file for all if their traces are equal and the name has no {rank}.

    Raises OptionsError where plans of ranks that differ would be written to the same file.
    """
    if output is None:
        return []
    if RANK in output.name:
        return [output.with_name(output.name.replace(RANK, str(rank))) for rank in range(len(traces))]
    if len({trace.fingerprint for trace in traces}) > 1:
        raise planner.OptionsError(
            f"option --output: the ranks differ, so each gets a plan of its own; put {RANK} into the name {output.name}"
        )
    return [output]
