"""One thing that was looked at."""

from __future__ import annotations

from typing import Literal

from planner.schema import FrozenModel

Verdict = Literal["ok", "note", "slow", "missing"]
"""note: nothing is wrong, but teraio could do more. slow: it works, slower than it should. missing: something does not work."""


class Finding(FrozenModel):
    """what: what was looked at. found: what there is. effect: what follows from that; remedy: what to do about it; both "" if
    nothing."""

    what: str
    verdict: Verdict
    found: str
    effect: str = ""
    remedy: str = ""
