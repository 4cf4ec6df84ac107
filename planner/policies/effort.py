"""How hard plans are searched for: every threshold of `optimise` and of the choice of re-runs, by the length of the iteration.

Replays and programs take longer, the longer the iteration. What costs little in a short one is left out of a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.ilp import MANY_STAGES, MAX_INTEGER_STAGES
from planner.schedule import Breadth


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The thresholds of a search. Factors multiply the lower bound; shares are of a plan's cost."""

    # -- candidates from coarse solutions
    simple_starts: bool = True  # no decisions at all, and all updates on the host: coarse time says too little about few stages
    until_close: bool = False  # later solutions are not worked out once a plan is close: each takes seconds where stages are many
    leads: Sequence[float] = (3.0, 1.0, 0.0)  # reserves of prefetches, in their own transfer times; a longer one absorbs delays
    rounds: int = 3  # how often a schedule is made again by the clock of its replay: later rounds hardly change it
    close: float = 1.005  # good enough: what is left is about the coarse model's own error
    better: float = 0.9999  # less gain than this is no reason to go on: searches would creep
    # -- improvements
    improvements: int = 6  # around user code, and by other tiers: more rounds find nothing
    all_leads: Sequence[float] = (3.0, 1.0, 0.0)  # in these, one plan is improved, so that all reserves are affordable
    around_user_code: int = 3  # the cheapest candidates that are improved around user code
    large_blocks: int = 0  # the cheapest candidates in which large blocks leave or stay one by one
    update_sets: int = 8  # sets of updates on the host in place of the program's: each is planned anew
    worth_an_update_set: float = 0.999  # since each is planned anew, little gains do not pay
    worth_a_write: float = 1.01  # drives wear out: they are not written for less gain while host memory has room
    each_placement: bool = True  # other blocks for the best plan of each choice of updates, not only for the best of all
    blocks_beyond: float = 1.0  # only beyond this factor other blocks are tried
    exchanges: int = 300  # variants with other blocks that are replayed; and in long iterations at most ...
    exchanged_stages: int = 20_000  # ... so many stages in all of them together, which takes some seconds
    breadth: Breadth = Breadth(others=6, stages=6, leads=(1.0, 0.0), thorough=True)
    refined_drafts: bool = True  # drafts, which compare sets of re-runs, get rivals and other tiers, too
    # -- re-runs
    groups_first: bool = False  # re-runs are decided before the rest: a plan without them takes long and is seldom the best
    waits: float = 1e-3  # share of the iteration that must be stalls for re-runs to be worth a look
    close_alone: float = 1.002  # a plan without re-runs within this factor is good enough
    close_draft: float = 1.004  # a draft within this factor is good enough
    far: float = 1.02  # beyond it, rivals are asked, and a plan without re-runs is compared with more than the program's sets
    far_in_part: float = 1.05  # the same for a part of an iteration
    worse_kinds: int = 2  # so many sets of more and more kinds that are no better, one after the other, end that comparison
    all_places: bool = True  # sets are drafted with early and with late places; otherwise with those that the program prefers
    simple_sets: bool = False  # all simple sets of groups are tried, not only whole layers
    many: float = 0.5  # whole layers are tried if the program runs about this share of them again
    changes: int = 0  # single changes of the best set that are tried


_SHORT = Effort()
_SHORTEST = replace(_SHORT, simple_sets=True, changes=24)  # a plan takes a fraction of a second
_LONG = replace(
    _SHORT,
    simple_starts=False,
    until_close=True,
    leads=(1.0,),
    rounds=2,
    around_user_code=1,
    each_placement=False,
    blocks_beyond=1.02,  # dozens of replays take seconds
    breadth=Breadth(others=1, stages=1, leads=(1.0,), thorough=False),  # it is better to try little for many copies
    refined_drafts=False,
    groups_first=True,
    all_places=False,  # each draft takes seconds
)
_RATHER_LONG = replace(_LONG, breadth=_SHORT.breadth, large_blocks=3, all_places=True)  # a replay takes some twenty milliseconds
_VERY_LONG = replace(
    _LONG,
    close=1.01,  # programs take long, and find little that is better within this factor
    all_leads=(1.0,),  # others gain nothing there, and each is replayed for a quarter of a second
    groups_first=False,  # so does the program for re-runs: it is left out where a plan without them is close
    close_alone=1.01,
)
_LONGEST = replace(
    _VERY_LONG,
    update_sets=2,  # each is planned for several seconds
    around_user_code=0,  # many replays, each of half a second, for less than a thousandth
)
# The most stages of each kind of iteration.
_BY_STAGES = ((32, _SHORTEST), (MAX_INTEGER_STAGES, _SHORT), (200, _RATHER_LONG), (500, _LONG), (MANY_STAGES, _VERY_LONG))


def effort_of(stages: int) -> Effort:
    """Return the effort for an iteration of so many stages, re-runs included."""
    return next((effort for most, effort in _BY_STAGES if stages <= most), _LONGEST)
