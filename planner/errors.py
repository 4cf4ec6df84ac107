"""Every error that teraio raises on purpose, in one tree.

::

    TeraioError
    ├── OptionsError             an option is unknown, ill-typed or contradicts another
    ├── BudgetError              the device budget is below what one stage needs
    ├── UnsupportedError         the program uses something that teraio cannot manage
    ├── RankError                another rank of the machine failed, or does not answer
    ├── FileFormatError          a file is damaged, or of a wrong format or version
    │   ├── TraceError           ... a trace
    │   ├── PlanError            ... a plan, or a plan that belongs to another trace
    │   └── CheckpointError      ... a checkpoint, or one that belongs to another model
    ├── InfeasiblePlanError      a plan cannot be carried out (over a budget, deadlocked, inconsistent)
    ├── SolverError              the solver failed
    └── StorageError             the storage tier failed
        ├── StorageFullError     not enough free space, or the storage budget is used up
        ├── StorageIOError       a read or write of a spill file, or a read of a checkpoint, failed
        └── ChecksumError        the bytes that were read differ from those that were written

A message says what was found, what was allowed and what to do.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self


class TeraioError(Exception):
    """Root of all errors that teraio raises on purpose."""

    def without_traceback(self) -> Self:
        """Return a copy that holds none of the frames through which this error was raised, nor what they hold."""
        fresh = copy.copy(self)
        fresh.__cause__ = self.__cause__
        return fresh

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the message and the attributes, without the constructor, which takes other arguments."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[TeraioError], args: tuple[object, ...]) -> TeraioError:
    return kind.__new__(kind, *args)


class OptionsError(TeraioError):
    """An option is unknown, ill-typed, out of range or contradicts another."""


@dataclass(kw_only=True, eq=False, repr=False)
class BudgetError(TeraioError):
    """The device budget is too small.

    Attributes:
        smallest_bytes: the smallest device budget that works, in bytes, but for `not_counted`.
        budget_bytes: the device budget that was given, in bytes.
        stage: name of the stage that needs the most.
        largest: the stages of the graphs that need the most, with the bytes that each needs, in descending order; up to three.
            Empty if the graphs are not what is too large.
        in_pieces: whether that stage is a loss over classes, which can be computed in pieces.
        not_counted: what may need more and is not known yet, in words; "" if all is known.
        why: why it needs so much, in words; "" if the stage alone does.
    """

    smallest_bytes: int
    budget_bytes: int
    stage: str
    largest: Sequence[tuple[str, int]] = ()
    in_pieces: bool = False
    not_counted: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        self.largest = tuple(self.largest)
        needed, why = exact_bytes(self.smallest_bytes), self.why and f", {self.why}"
        message = (
            f"the device budget of {exact_bytes(self.budget_bytes)} is too small: stage {self.stage!r} needs {needed} "
            f"at once{why}; give a memory_budget of at least {self.smallest_bytes} bytes"
        )
        if self.not_counted:
            message += f" (not counted, since not known yet: {self.not_counted})"
        if self.largest:
            needs = ", ".join(f"{name!r} {format_bytes(size)}" for name, size in self.largest)
            message += f". The stages that need the most: {needs}. Smaller batches or shorter sequences lower their needs"
        if self.in_pieces:
            message += (
                ". It is a loss over classes, for all rows at once: tiles='auto' computes one by some rows at a time if it knows "
                "all operators, torch.nn.functional.linear_cross_entropy (PyTorch 2.13) in any case"
            )
        super().__init__(message)

    def asking_for(self, smallest_bytes: int, *, not_counted: str) -> BudgetError:
        """Return this error with another smallest budget."""
        return replace(self, smallest_bytes=smallest_bytes, not_counted=not_counted)


class UnsupportedError(TeraioError):
    """The program does something that teraio cannot manage. The message says what to do instead."""


class RankError(TeraioError):
    """Another rank of the machine cannot train, or has not answered in time. The message names it."""


class FileFormatError(TeraioError):
    """A file has the wrong format or version, is damaged, or contradicts itself.

    The message names the file and the place in it (line and column, or the path of the field).
    """


class TraceError(FileFormatError):
    """A trace is malformed: a damaged file, an unknown version, or contents that contradict each other."""


class PlanError(FileFormatError):
    """A plan is malformed (a damaged file, an unknown version, too large numbers), or it was made for another trace."""


class CheckpointError(FileFormatError):
    """A checkpoint is damaged or incomplete, or it was written for another model."""


class InfeasiblePlanError(TeraioError):
    """A plan cannot be carried out within its budgets.

    Attributes:
        stage: name of the stage that cannot run, or None where no single stage is the cause.
        block: name of the block that is in the way, or None.
    """

    def __init__(self, message: str, *, stage: str | None = None, block: str | None = None) -> None:
        self.stage = stage
        self.block = block
        super().__init__(message)


class SolverError(TeraioError):
    """The solver failed, or it found no solution."""


class StorageError(TeraioError):
    """The storage tier failed."""


class StorageFullError(StorageError):
    """There is not enough free space, or the storage budget is used up."""


@dataclass(kw_only=True, eq=False, repr=False)
class StorageIOError(StorageError):
    """A read or write of a spill file, or a read of a checkpoint, failed. Nothing of a failed read is used.

    Attributes:
        path: the file.
        block: name of the block.
        errno: the operating system's error number.
        action: "read", "write" or "access".
        remedy: what to do; by default, to look after the drive.
    """

    path: str
    block: str
    errno: int
    action: str = "access"
    remedy: str = "check the drive and its free space, then restart from the last checkpoint"

    def __post_init__(self) -> None:
        why = f"[errno {self.errno}] {os.strerror(self.errno)}; {self.remedy}"
        super().__init__(f"cannot {self.action} block {self.block!r} in {self.path}: {why}")


@dataclass(kw_only=True, eq=False, repr=False)
class ChecksumError(StorageError):
    """A range of a block differs from what was written. Nothing of the read is used.

    Attributes:
        path: the file.
        offset_bytes: where its first page that differs begins in the file.
        block: name of the block.
        expected: the checksum (64 bits) of that page when it was written.
        found: its checksum when it was read.
        tier: where the block was; None if only the file is known.
        remedy: what to do; by default, not to trust the drive.
    """

    path: str
    offset_bytes: int
    block: str
    expected: int
    found: int
    tier: str | None = None
    remedy: str = "do not trust this drive: check it, or give another storage directory"

    def __post_init__(self) -> None:
        where = f"{self.path} ({self.tier} tier)" if self.tier is not None else self.path
        super().__init__(
            f"block {self.block!r} in {where} from offset {self.offset_bytes} on came back different: its checksum was "
            f"{self.expected:016x} and is {self.found:016x}; {self.remedy}, then restart from the last checkpoint"
        )


# -- sizes as messages and tables tell them


def format_bytes(size_bytes: float) -> str:
    """Return "1.50 GiB", "64.0 MiB" or "10 B": three digits, so that columns are easy to compare."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{three_digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def exact_bytes(size_bytes: int | None) -> str:
    """Return "1.50 GiB (1,610,612,736 bytes)"; "" for None."""
    if size_bytes is None:
        return ""
    rounded = format_bytes(size_bytes)
    return rounded if size_bytes < 1024 else f"{rounded} ({size_bytes:,} bytes)"


def three_digits(value: float) -> str:
    """Return "1.50", "12.5" or "1,250"."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
