"""The command `teraio doctor`: what it looks at, and its table. It needs torch, which is imported when the command runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

import planner
from teraio.cli.tables import Page, plain, table_of

if TYPE_CHECKING:
    from teraio.capturing import MachineDescription
    from teraio.doctor import Examination

_STYLES = {"ok": "green", "note": "", "slow": "yellow", "missing": "bold red"}


def examined(storage: Sequence[Path], device: str, *, describe: bool) -> tuple[Examination, MachineDescription | None]:
    """Examine this machine; `describe`: measure it too. Raises OptionsError for an unknown device."""
    import torch

    from teraio.doctor import examine, measured_machine

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        raise planner.OptionsError(f"option --device: found {device!r}, wanted cpu or cuda")
    where = torch.device(chosen)
    return examine(storage, where), measured_machine(storage, where) if describe else None


def doctor_tables(found: Examination) -> Page:
    """Return what was found, a row each."""
    table = table_of("looked at", "", "found", "what follows", "what to do")
    for each in found.findings:
        verdict = Text(each.verdict, style=_STYLES[each.verdict])
        table.add_row(plain(each.what), verdict, plain(each.found), plain(each.effect), plain(each.remedy))
    return (table,)
