"""Recompute groups in a trace: what they may say, and that files without them stay as they were."""

from pathlib import Path
from typing import Any

import pytest

from planner import NotRecomputed, Trace, TraceError
from planner.schema import Predicted

from ..strategies import hardware

CHAIN = Path(__file__).parents[3] / "traces" / "hand" / "chain.json"


def content(**group: Any) -> dict[str, Any]:
    """Two forward stages, the second of which can run again, and a backward stage; with changes of the group."""
    common = dict(size_bytes=10, persistent=False)
    blocks = [
        dict(id=0, name="w", kind="parameter", size_bytes=10, persistent=True, reads=[0, 1], writes=[2]),
        dict(id=1, name="x", kind="activation", reads=[1], writes=[0], **common),
        dict(id=2, name="y", kind="activation", reads=[2], writes=[1], **common),
        dict(id=3, name="logits", kind="activation", movable=False, reads=[2], writes=[1], **common),
    ]
    phases = ("forward", "forward", "backward")
    return dict(
        name="small",
        hardware=hardware(),
        stages=[dict(id=n, name=f"stage{n}", phase=phase, duration_seconds=1.0) for n, phase in enumerate(phases)],
        blocks=blocks,
        recompute=[dict(id=0, stage=1, blocks=[2], reads=[0, 1], duration_seconds=1.0) | group],
    )


def test_a_group_is_read_and_written(tmp_path: Path) -> None:
    trace = Trace.build(**content(workspace_bytes=5))
    reasons = trace.model_copy(update={"not_recomputed": (NotRecomputed(stage=0, reason="draws random numbers"),)})
    assert reasons.fingerprint == trace.fingerprint, "plans do not depend on the reasons"
    reasons.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == reasons
    trace.save(tmp_path / "without.json")
    assert "not_recomputed" not in (tmp_path / "without.json").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(id=1), "recompute groups: ids must be 0, 1, 2"),
        (dict(stage=2), "of phase 'backward'; only forward stages can be"),
        (dict(blocks=[]), "at least 1 item"),
        (dict(blocks=[9]), "refers to block 9"),
        (dict(blocks=[1]), "cannot make block 1: that takes a movable activation or buffer that stage 1 writes first"),
        (dict(blocks=[0]), "cannot make block 0"),
        (dict(blocks=[3]), "cannot make block 3"),
        (dict(blocks=[2, 2]), "names a block twice in blocks"),
        (dict(reads=[0]), r"reads the blocks \[0\], its stage \[0, 1\]: name exactly these"),
        (dict(reads=[0, 1, 2]), "name exactly these"),
        (dict(reads=[0, 0, 1]), "names a block twice in reads"),
        (dict(workspace_bytes=-1), "workspace_bytes"),
    ],
)
def test_a_group_that_does_not_fit_its_stage_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Trace.build(**content(**change))


def test_a_stage_that_changes_a_block_is_no_group_and_a_stage_has_one_group() -> None:
    changing = content()
    changing["blocks"][1]["writes"] = [0, 1]
    with pytest.raises(TraceError, match="stage 1 changes block 1, which exists before it; leave the group out"):
        Trace.build(**changing)
    twice = content()
    twice["recompute"].append(twice["recompute"][0] | dict(id=1))
    with pytest.raises(TraceError, match="group 1 runs stage 1 again as another does"):
        Trace.build(**twice)


def test_files_and_fingerprints_without_groups_stay_as_they_were(tmp_path: Path) -> None:
    trace = Trace.load(CHAIN)  # compares the fingerprint that was written before there were groups
    assert trace.recompute == () and trace.not_recomputed == ()
    common = dict(ideal_seconds=1.0, lower_bound_seconds=1.0, stall_seconds=0.0, peak_bytes={}, moved_bytes={})
    predicted = Predicted(iteration_seconds=1.0, storage_written_bytes=0, **common)  # type: ignore[arg-type]
    assert "recompute_seconds" not in predicted.model_dump()
    assert predicted.model_copy(update={"recompute_seconds": 1.0}).model_dump()["recompute_seconds"] == 1.0
