"""Bad files are refused with a message that names the file, the place in it and what to do."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from planner import Budgets, Plan, PlanError, Trace, TraceError, plan

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture
def trace_content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TRACES / "hand" / "wrap.json").read_text())
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
    text = (TRACES / "hand" / "chain.json").read_text()
    for length in range(0, len(text) - 2, 97):
        assert "line" in refused(tmp_path, text[:length])
    assert "line 2 column" in refused(tmp_path, "{\n oops")


def test_missing_file_and_not_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        Trace.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not a text file"):
        Trace.load(tmp_path / "binary.json")


def test_links_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    trace = Trace.load(TRACES / "hand" / "chain.json")
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
    trace = Trace.load(TRACES / "hand" / "chain.json")
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
    trace = Trace.load(TRACES / "hand" / "chain.json")
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
        (("blocks", 0, "reads"), [-1], "blocks.0.reads.0"),
        (("blocks", 0, "size_bytes"), -1, "blocks.0.size_bytes"),
        (("blocks", 0, "size_bytes"), "10", "blocks.0.size_bytes"),
        (("blocks", 0, "kind"), "tensor", "blocks.0.kind"),
        (("blocks", 0, "surprise"), 1, "blocks.0.surprise"),
        (("stages", 0, "duration_seconds"), float("nan"), "stages.0.duration_seconds"),
        (("stages", 0, "duration_seconds"), float("inf"), "stages.0.duration_seconds"),
        (("stages",), [], "stages"),
        (("hardware", "links", 0, "from"), "disk", "hardware.links.0.from"),
        (("hardware", "links", 0, "to"), "device", "two different tiers"),
        (("hardware", "links", 0, "bytes_per_second"), 0, "bytes_per_second"),
        (
            ("subgroups",),
            [dict(id=0, stage=2, blocks=[5], elements=1, device_seconds=0.0, host_seconds=0.0)],
            "subgroup 0 refers to block 5",
        ),
        (("recompute",), [dict(id=0, stage=8, blocks=[0], reads=[], duration_seconds=0.0)], "group 0 refers to stage 8"),
        (("not_recomputed",), [dict(stage=4, reason="random")], "not_recomputed refers to stage 4"),
        (("stages", 1, "phase"), "recompute", "stage 1 has the phase 'recompute', which only re-runs"),
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


def test_block_without_a_use(tmp_path: Path, trace_content: dict[str, Any]) -> None:
    trace_content["blocks"][0].update(reads=[], writes=[])
    assert "block 0 has no use" in refused(tmp_path, trace_content)


def test_links_given_twice(tmp_path: Path, trace_content: dict[str, Any]) -> None:
    trace_content["hardware"]["links"] *= 2
    assert "found twice: device->storage, storage->device" in refused(tmp_path, trace_content)


def test_changed_after_it_was_written(tmp_path: Path, trace_content: dict[str, Any]) -> None:
    trace_content["fingerprint"] = json.loads((TRACES / "hand" / "wrap.json").read_text())["fingerprint"]
    trace_content["stages"][0]["workspace_bytes"] += 1
    assert "does not match its fingerprint" in refused(tmp_path, trace_content)


def test_the_fingerprint_is_of_the_content_only() -> None:
    trace = Trace.load(TRACES / "hand" / "wrap.json")
    renamed = trace.model_copy(update={"name": "other", "created_by": "someone"})
    assert renamed.fingerprint == trace.fingerprint
    hardware = trace.hardware.model_copy(update={"storage_bytes": 1})
    assert trace.model_copy(update={"hardware": hardware}).fingerprint != trace.fingerprint


def test_build_raises_a_trace_error() -> None:
    with pytest.raises(TraceError, match=r"stages: Field required"):
        Trace.build(name="x", hardware={"name": "y", "device_memory_bytes": 1})


def test_traces_and_plans_cannot_be_changed() -> None:
    trace = Trace.load(TRACES / "hand" / "wrap.json")
    with pytest.raises(ValidationError, match="frozen"):
        trace.name = "other"  # type: ignore[misc]


def test_bad_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = plan(Trace.load(TRACES / "hand" / "wrap.json"), Budgets(device_bytes=20))
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


def test_the_path_of_a_link_is_part_of_the_content_only_if_it_is_given(tmp_path: Path) -> None:
    trace = Trace.load(TRACES / "hand" / "wrap.json")
    trace.save(tmp_path / "without.json")
    assert all("path" not in link for link in json.loads((tmp_path / "without.json").read_text())["hardware"]["links"])
    links = tuple(link.model_copy(update={"path": "posix"}) for link in trace.hardware.links)
    other = trace.model_copy(update={"hardware": trace.hardware.model_copy(update={"links": links})})
    assert other.fingerprint != trace.fingerprint == Trace.load(tmp_path / "without.json").fingerprint
    other.save(tmp_path / "with.json")
    assert Trace.load(tmp_path / "with.json") == other
    assert [link.path for link in Trace.load(tmp_path / "with.json").hardware.links] == ["posix", "posix"]


def test_the_size_of_subgroups_is_in_the_files_only_if_it_is_known(tmp_path: Path) -> None:
    trace = Trace.load(TRACES / "hand" / "wrap.json")
    known = trace.model_copy(update={"subgroup_bytes": 1000})
    assert known.fingerprint == trace.fingerprint, "plans for either are plans for both"
    for number, each in enumerate((trace, known)):
        path, plan_path = tmp_path / f"trace.{number}.json", tmp_path / f"plan.{number}.json"
        made = plan(each, Budgets(device_bytes=20), policy="g10")
        each.save(path)
        made.save(plan_path)
        assert Trace.load(path).subgroup_bytes == Plan.load(plan_path).subgroup_bytes == each.subgroup_bytes
        assert ("subgroup_bytes" in path.read_text()) == ("subgroup_bytes" in plan_path.read_text()) == (number == 1)
    assert Trace.load(tmp_path / "trace.1.json") == known
