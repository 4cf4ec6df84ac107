"""What several ranks log."""

import logging

import pytest

from teraio.ranks import RankPlace, only_first_rank_informs


def test_rank_0_informs_and_all_warn(caplog: pytest.LogCaptureFixture) -> None:
    for rank, expected in ((0, ["hello", "rank 0: take care"]), (1, ["rank 1: take care"])):
        logger = logging.getLogger(f"test of rank {rank}")
        logger.setLevel(logging.INFO)
        for _ in range(2):
            only_first_rank_informs(logger, RankPlace(rank=rank, world_size=2))
        caplog.clear()
        logger.info("hello")
        logger.warning("take %s", "care")
        assert [record.getMessage() for record in caplog.records] == expected
    alone = logging.getLogger("test of one rank")
    only_first_rank_informs(alone, RankPlace())
    assert not alone.filters
