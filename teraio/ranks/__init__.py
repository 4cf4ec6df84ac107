"""The ranks of one machine: where this process stands among them, what they tell each other, and what goes to the log."""

from teraio.ranks.group import RankGroup, open_group
from teraio.ranks.log import only_first_rank_informs
from teraio.ranks.place import RankPlace, rank_place

__all__ = [
    "RankGroup",
    "RankPlace",
    "only_first_rank_informs",
    "open_group",
    "rank_place",
]
