"""What the log of several ranks says: information of rank 0 only, warnings of all, with their number."""

from __future__ import annotations

import logging

from teraio.ranks.place import RankPlace

__all__ = ["only_first_rank_informs"]


class _FirstRankInforms(logging.Filter):
    """Lets information pass on rank 0 only, and names the rank in all other messages."""

    def __init__(self, place: RankPlace) -> None:
        super().__init__()
        self._rank = place.rank

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return self._rank == 0 or record.levelno < logging.INFO
        record.msg = f"rank {self._rank}: {record.msg}"
        return True


def only_first_rank_informs(logger: logging.Logger, place: RankPlace) -> None:
    """Let the logger inform on rank 0 only, if there are several ranks. May be called again."""
    if place.world_size > 1 and not any(isinstance(each, _FirstRankInforms) for each in logger.filters):
        logger.addFilter(_FirstRankInforms(place))
