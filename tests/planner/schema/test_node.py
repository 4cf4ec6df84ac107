"""The file of a node: what is read, and what is refused with its place."""

import json
from pathlib import Path

import pytest

from planner import Node, NodeRate, TraceError


def test_a_node_is_read_as_it_was_written(tmp_path: Path) -> None:
    shared = (
        NodeRate(name="drives", links=("device->storage",), bytes_per_second=26e9),
        NodeRate(name="bus", links=("device->host", "device->storage"), bytes_per_second=55e9, ranks=(0, 1)),
    )
    node = Node(name="two pairs", ranks=4, shared=shared, host_memory_bytes=1 << 40)
    node.save(tmp_path / "node.json")
    assert Node.load(tmp_path / "node.json") == node
    assert [rate.members(4) for rate in node.shared] == [(0, 1, 2, 3), (0, 1)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ranks": 0}, "ranks"),
        ({"format": "teraio.plan"}, "format"),
        ({"shared": [{"name": "d", "links": ["device->tape"], "bytes_per_second": 1.0}]}, "links"),
        ({"shared": [{"name": "d", "links": [], "bytes_per_second": 1.0}]}, "links"),
        ({"shared": [{"name": "d", "links": ["device->host"], "bytes_per_second": 1.0, "ranks": [2]}]}, "ranks \\[2\\]"),
        ({"shared": [{"name": "d", "links": ["device->host"], "bytes_per_second": 1.0, "ranks": []}]}, "ranks \\[\\]"),
        ({"shared": [{"name": "d", "links": ["device->host"] * 2, "bytes_per_second": 1.0}]}, "names a link twice"),
        ({"gpus": 2}, "gpus"),
    ],
)
def test_a_node_that_contradicts_itself_is_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    path = tmp_path / "node.json"
    content = Node(name="m", ranks=2).model_dump(mode="json")
    path.write_text(json.dumps({**content, **changed}))
    with pytest.raises(TraceError, match=message) as caught:
        Node.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
