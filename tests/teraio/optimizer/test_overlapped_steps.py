"""How updates within a backward graph are cut into stages."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

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


@given(
    members=st.lists(
        st.builds(Planned, st.sampled_from([ONE, OTHER]), st.integers(1, 12 << 20), st.integers(0, 6)), min_size=1, max_size=12
    ),
    largest=st.integers(0, 32 << 20),
)
def test_each_is_updated_once_and_not_too_early(members: list[Planned], largest: int) -> None:
    stages = cut(members, largest)
    assert sorted(number for stage in stages for number in stage.members) == list(range(len(members)))
    assert [stage.after for stage in stages] == sorted(stage.after for stage in stages)
    for stage in stages:
        own = [members[number] for number in stage.members]
        assert stage.after == max(member.final.after for member in own)
        assert len({member.facts for member in own}) == 1
        size, last = sum(member.size_bytes for member in own), own[-1].size_bytes
        assert size <= largest or len(own) == 1 or 2 * (size - last) < largest
