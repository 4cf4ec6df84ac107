"""Look at everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from planner.schema import FrozenModel
from teraio.doctor.drives import drive
from teraio.doctor.finding import Finding
from teraio.doctor.memory import memory
from teraio.doctor.software import software


class Examination(FrozenModel):
    """findings: in the order in which things were looked at."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing."""
        return all(finding.verdict != "missing" for finding in self.findings)


def examine(storage: Sequence[Path], device: torch.device) -> Examination:
    """Look at software, memory, and the paths between `device` and the directories. Takes seconds for each directory."""
    drives = [finding for directory in storage for finding in drive(directory, device).findings]
    return Examination(findings=(*software(), *memory(), *drives))
