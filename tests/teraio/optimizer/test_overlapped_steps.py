"""How updates within a backward graph are cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

from teraio.optimizer.final_gradients import FinalGradient
from teraio.optimizer.overlapped_steps import UpdateStage, cut_updates

from .plain_training import KIB


class Planned:
    """What `cut_updates` looks at: the optimizer, the bytes, and the stage."""

    def __init__(self, optimizer: object, size_bytes: int, after: int) -> None:
        self.facts, self.size_bytes, self.final = optimizer, size_bytes, FinalGradient(slot=0, after=after)


ONE, OTHER = object(), object()


def cut(members: Sequence[Planned], largest_bytes: int, **sizes: int) -> tuple[UpdateStage, ...]:
    return cut_updates(members, largest_bytes, **sizes)  # type: ignore[arg-type]


def test_large_ones_by_themselves_small_ones_with_what_comes_after() -> None:
    members = [Planned(ONE, KIB, 0), Planned(ONE, 8 * KIB, 1), Planned(ONE, KIB, 2), Planned(ONE, KIB, 2), Planned(ONE, KIB, 5)]
    assert cut(members, 64 * KIB, min_bytes=4 * KIB) == (UpdateStage(1, (0, 1)), UpdateStage(5, (2, 3, 4)))
    assert cut(members, 0, min_bytes=4 * KIB) == tuple(UpdateStage(m.final.after, (n,)) for n, m in enumerate(members))


def test_every_optimizer_has_stages_of_its_own() -> None:
    members = [Planned(ONE, KIB, 1), Planned(OTHER, KIB, 0), Planned(ONE, KIB, 0), Planned(OTHER, KIB, 3)]
    assert cut(members, 64 * KIB) == (UpdateStage(1, (2, 0)), UpdateStage(3, (1, 3)))
