"""Which nodes of a graph share a storage, and how large the storages are, from fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from torch.fx import Node

from teraio.stages import cost

StorageKey = tuple[Node, tuple[Any, ...]]
"""The node that owns a storage, and which of its results: the indices that lead to it, as results may be nested."""


def storages_of(nodes: Sequence[Node]) -> dict[Node, StorageKey]:
    """Return, for each of some nodes of a graph in order and for what they take, the storage that its result lies in."""
    keys: dict[Node, StorageKey] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            keys.setdefault(source, (source, ()))
        first = node.all_input_nodes[0] if node.all_input_nodes else None
        if first is None or not (cost.is_view(node) or cost.is_getitem(node)) or first.meta.get("val") is None:
            keys[node] = (node, ())
        elif cost.is_view(node) or not isinstance(_at(keys[first]), (tuple, list)):
            keys[node] = keys[first]
        else:
            keys[node] = (keys[first][0], (*keys[first][1], node.args[1]))
    return keys


def storage_size(key: StorageKey, keys: Iterable[StorageKey], symbols: cost.Symbols = MappingProxyType({})) -> int:
    """Return the bytes of a storage. Several results count without those in `keys`."""
    size = bytes_at(key, symbols)
    if isinstance(_at(key), (tuple, list)):
        size -= sum(bytes_at(k, symbols) for k in set(keys) if k[0] is key[0] and k[1] and k[1][:-1] == key[1])
    return size


def _at(key: StorageKey) -> Any:
    """Return the fake value that lies there: a tensor, or several."""
    owner, path = key
    value: Any = owner.meta.get("val")
    for index in path:
        value = value[index]
    return value


def bytes_at(key: StorageKey, symbols: cost.Symbols = MappingProxyType({})) -> int:
    """Return the bytes of all tensors that lie there."""
    return sum((cost.storage_bytes(t, symbols) for t in cost.fake_tensors(_at(key))), 0)
