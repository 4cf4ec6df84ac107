"""The ranks of one machine: what they tell each other, how they divide the machine, and what goes to the log."""

from teraio.ranks.division import DrivesAndMemory, divided, divided_alone, divided_among
from teraio.ranks.group import RankGroup, open_group
from teraio.ranks.messages import only_first_rank_informs

__all__ = [
    "DrivesAndMemory",
    "RankGroup",
    "divided",
    "divided_alone",
    "divided_among",
    "only_first_rank_informs",
    "open_group",
]
