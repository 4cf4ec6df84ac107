"""Bad files are refused with a message that names the file, the place in it and what to do."""

import functools
import gzip
import json
import operator
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from planner import Budgets, Plan, PlanError, Trace, TraceError, plan
from planner.schema import Predicted

from ..traces import HAND, IN, OUT, block, group, hand, links, numbered, shared_rate, staged, subgroup, trace

TRACES = HAND.parent
UP_TO_10 = {"lowest": [1], "highest": [10]}


@pytest.fixture
def trace_content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HAND / "wrap.json").read_text())
    del content["fingerprint"]
    return content


def refused(tmp_path: Path, content: object) -> str:
    path = tmp_path / "trace.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TraceError) as caught:
        Trace.load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_cut_short(tmp_path: Path) -> None:
    text = (HAND / "chain.json").read_text()
    for length in range(0, len(text) - 2, 97):
        assert "line" in refused(tmp_path, text[:length])
    assert "line 2 column" in refused(tmp_path, "{\n oops")
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b"{" * 1000)[:-9])
    with pytest.raises(TraceError, match=r"trace\.json\.gz: not a whole gzip file"):
        Trace.load(path)


def test_a_trace_survives_compression(tmp_path: Path) -> None:
    hand("chain").save(tmp_path / "trace.json.gz")
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).startswith(b"{")
    assert Trace.load(tmp_path / "trace.json.gz").fingerprint == hand("chain").fingerprint


def test_missing_file_and_not_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        Trace.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not a text file"):
        Trace.load(tmp_path / "binary.json")


def test_links_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    trace = hand("chain")
    link, target, pipe = tmp_path / "link.json", tmp_path / "deep" / "target.json", tmp_path / "pipe"
    target.parent.mkdir()
    link.symlink_to(target)
    for _ in range(2):  # without a target, and with one
        trace.save(link)
        assert link.is_symlink() and Trace.load(target) == trace
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as threads:
        received = threads.submit(pipe.read_text)
        trace.save(pipe)
        assert received.result(timeout=60) == target.read_text()
    assert pipe.is_fifo() and {path.name for path in tmp_path.iterdir()} == {"deep", "link.json", "pipe"}


@pytest.mark.parametrize("link", ["trace.json", "folder"])
def test_links_that_others_can_make_are_refused(tmp_path: Path, link: str) -> None:
    """As in /tmp: another user's link would make this user replace a file of his own."""
    trace = hand("chain")
    private, shared = tmp_path / "private", tmp_path / "shared"
    private.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    (private / "trace.json").write_text("mine")
    (shared / link).symlink_to(private / "trace.json" if link == "trace.json" else private)
    with pytest.raises(OSError, match="is a symbolic link that others could have made.*" + re.escape(str(shared / link))):
        trace.save(shared / "trace.json" if link == "trace.json" else shared / link / "trace.json")
    assert (private / "trace.json").read_text() == "mine"
    trace.save(shared / "other.json")


def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_the_umask(tmp_path: Path) -> None:
    trace = hand("chain")
    path = tmp_path / "trace.json"
    before = os.umask(0o077)
    try:
        trace.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        os.umask(0o022)
        trace.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        trace.save(tmp_path / f"{'n' * 250}.json")
        assert (tmp_path / f"{'n' * 250}.json").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_other_format_and_version(tmp_path: Path, trace_content: dict[str, Any]) -> None:
    assert "expected a JSON object" in refused(tmp_path, [1])
    assert "'teraio.plan'" in refused(tmp_path, {**trace_content, "format": "teraio.plan"})
    assert "version 2 is not known" in refused(tmp_path, {**trace_content, "version": 2})
    assert "version None" in refused(tmp_path, {k: v for k, v in trace_content.items() if k != "version"})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("stages", 1, "id"), 7, "found id 7 at position 1"),
        (("blocks", 0, "reads"), [9], "used by stage 9; the last stage is 3"),
        (("blocks", 0, "reads"), [3, 1], "must ascend"),
        (("blocks", 0, "size_bytes"), -1, "blocks.0.size_bytes"),
        (("blocks", 0, "kind"), "tensor", "blocks.0.kind"),
        (("blocks", 0, "surprise"), 1, "blocks.0.surprise"),
        (("stages", 0, "duration_seconds"), float("nan"), "stages.0.duration_seconds"),
        (("stages",), [], "stages"),
        (("hardware", "links", 0, "from"), "disk", "hardware.links.0.from"),
        (("hardware", "links", 0, "to"), "device", "two different tiers"),
        (("blocks",), numbered([block(10)], "b"), "block 0 has no use"),
        (("blocks",), numbered([block(10, [0], [1], dies_after=1)], "b"), "dies after stage 1"),
        (("blocks",), numbered([block(10, [0], [1], dies_after=3, persistent=True)], "b"), "only one that is not persistent"),
        (("blocks",), numbered([block(10, [0], [1], dies_after=5)], "b"), "the last stage is 3"),
        (("hardware", "links"), links({OUT: 1.0, IN: 1.0})["links"] * 2, f"found twice: {OUT}, {IN}"),
        (("subgroups",), numbered([subgroup(2, [5])]), "subgroup 0 refers to block 5"),
        (("subgroups",), numbered([subgroup(2, [])] * 2), "subgroups up to 1 take 2.0 s of stage 2, which lasts 1.0 s"),
        (("lengths",), {**UP_TO_10, "block_bytes": [dict(id=1, coefficients=[1])]}, "block_bytes refers to id 1; there are 1"),
        (("lengths",), {**UP_TO_10, "stage_seconds": [dict(id=0, coefficients=[])]}, "lengths.stage_seconds.0.coefficients"),
        (("lengths",), {**UP_TO_10, "lowest": [1, 1]}, "must be as many"),
        (("lengths",), {**UP_TO_10, "lowest": [11]}, "the highest must not be below the lowest"),
        (("recompute",), [dict(id=0, stage=8, blocks=[0], reads=[], duration_seconds=0.0)], "group 0 refers to stage 8"),
        (("not_recomputed",), [dict(stage=4, reason="random")], "not_recomputed refers to stage 4"),
        (("stages", 1, "phase"), "recompute", "stage 1 has the phase 'recompute', which only re-runs"),
        (("stages", 0, "collective_seconds"), 2.0, "stage 0 lasts 1.0 s, but spends 2.0 s in collectives"),
        (
            ("hardware", "shared"),
            [shared_rate("x", 1.0, OUT, "host->device")],
            "shared rate 'x' names links that do not exist: host->device",
        ),
    ],
)
def test_contents_that_contradict_themselves(
    tmp_path: Path, trace_content: dict[str, Any], path: tuple[Any, ...], value: object, message: str
) -> None:
    target: Any = trace_content
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert message in refused(tmp_path, trace_content)


def test_changed_after_it_was_written(tmp_path: Path, trace_content: dict[str, Any]) -> None:
    trace_content["fingerprint"] = json.loads((HAND / "wrap.json").read_text())["fingerprint"]
    trace_content["stages"][0]["workspace_bytes"] += 1
    assert "does not match its fingerprint" in refused(tmp_path, trace_content)


def test_the_fingerprint_is_of_the_content_only() -> None:
    trace = hand("wrap")
    renamed = trace.model_copy(update={"name": "other", "created_by": "someone"})
    assert renamed.fingerprint == trace.fingerprint
    hardware = trace.hardware.model_copy(update={"storage_bytes": 1})
    assert trace.model_copy(update={"hardware": hardware}).fingerprint != trace.fingerprint


def test_bad_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = plan(hand("wrap"), Budgets(device_bytes=20))
    made.save(path)
    assert Plan.load(path) == made
    content = json.loads(path.read_text())
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"], "no temporary file is left"
    for change, message in [
        ({"version": 99}, "version 99 is not known"),
        ({"format": "x"}, "field 'format' is 'x'"),
        ({"moves": [{**content["moves"][0], "before": 4}]}, "need after ≤ offload.start"),
        ({"budgets": {"device_bytes": -1}}, "budgets.device_bytes"),
    ]:
        path.write_text(json.dumps({**content, **change}))
        with pytest.raises(PlanError) as caught:
            Plan.load(path)
        assert message in str(caught.value)


@pytest.mark.parametrize(("name", "model"), [("trace", Trace), ("plan", Plan)])
def test_the_published_schemas_name_every_field(name: str, model: type[Trace] | type[Plan]) -> None:
    published = json.loads((TRACES / f"{name}.schema.json").read_text())
    current = model.model_json_schema()

    def fields(schema: dict[str, Any]) -> dict[str, tuple[list[str], list[str]]]:
        parts = {"": schema, **schema["$defs"]}
        return {key: (sorted(part["properties"]), sorted(part.get("required", []))) for key, part in parts.items()}

    assert fields(published) == fields(current)


LATER: dict[str, tuple[tuple[str | int, ...], object, bool]] = {
    "collective_seconds": (("stages", 0), 0.25, True),
    "dies_after": (("blocks", 2), 4, True),
    "path": (("hardware", "links", 0), "posix", True),
    "subgroup_bytes": ((), 1000, False),
    "lengths": ((), {**UP_TO_10, "block_bytes": [{"id": 0, "coefficients": [0, 1]}]}, False),
    "not_recomputed": ((), [{"stage": 0, "reason": "draws random numbers"}], False),
    "tiled": ((), [{"what": "forward/head", "tiles": 8, "whole_bytes": 10, "again_seconds": 0.25}], False),
}
"""Fields that came after the first files: their places in the hand-made chain, values, and whether plans depend on them."""


@pytest.mark.parametrize("field", LATER)
def test_a_field_that_came_later_is_in_the_file_only_if_it_is_given(tmp_path: Path, field: str) -> None:
    """The fingerprint of the hand-made file, which is compared as it is read, was written before there was the field."""
    plain, path = hand("chain"), tmp_path / "trace.json"
    plain.save(path)
    assert field not in path.read_text() and Trace.load(path) == plain
    place, value, matters = LATER[field]
    content = json.loads(path.read_text()) | {"fingerprint": None}
    functools.reduce(operator.getitem, place, content)[field] = value
    path.write_text(json.dumps(content))
    given = Trace.load(path)
    given.save(path)
    assert path.read_text().count(field) == 1 and Trace.load(path) == given != plain
    assert (given.fingerprint != plain.fingerprint) == matters


def test_plans_say_the_size_of_subgroups_and_the_time_of_re_runs_only_where_there_are_some(tmp_path: Path) -> None:
    for size in (None, 1000):
        made = plan(hand("wrap").rebuilt(subgroup_bytes=size), Budgets(device_bytes=20), policy="g10")
        made.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json").subgroup_bytes == size
        assert ("subgroup_bytes" in (tmp_path / "plan.json").read_text()) == (size is not None)
    predicted = made.predicted
    assert isinstance(predicted, Predicted) and "recompute_seconds" not in predicted.model_dump()
    assert predicted.model_copy(update={"recompute_seconds": 1.0}).model_dump()["recompute_seconds"] == 1.0


# -- recompute groups


def with_group(**changes: Any) -> Trace:
    """Two forward stages, the second of which can run again, and a backward stage. changes: of the group, or `x_writes`."""
    blocks = [
        block(10, [2], [0, 1], "parameter"),
        block(10, changes.pop("x_writes", [0]), [1]),
        block(10, [1], [2]),
        block(10, [1], [2], movable=False),
    ]
    times = changes.pop("times", 1)
    return trace(staged("ffb"), blocks, recompute=[{**group(1, [2], [0, 1]), **changes}] * times)


def test_a_group_is_read_and_written(tmp_path: Path) -> None:
    made = with_group(workspace_bytes=5)
    made.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == made and made.recompute[0].workspace_bytes == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(id=1), "recompute groups: ids must be 0, 1, 2"),
        (dict(stage=2), "of phase 'backward'; only forward stages can be"),
        (dict(blocks=[]), "at least 1 item"),
        (dict(blocks=[1]), "cannot make block 1: that takes a movable activation or buffer that stage 1 writes first"),
        (dict(blocks=[3]), "cannot make block 3"),
        (dict(blocks=[2, 2]), "names a block twice in blocks"),
        (dict(reads=[0]), r"reads the blocks \[0\], its stage \[0, 1\]: name exactly these"),
        (dict(reads=[0, 0, 1]), "names a block twice in reads"),
        (dict(x_writes=[0, 1]), "stage 1 changes block 1, which exists before it; leave the group out"),
        (dict(times=2), "group 1 runs stage 1 again as another does"),
    ],
)
def test_a_group_that_does_not_fit_its_stage_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        with_group(**change)
