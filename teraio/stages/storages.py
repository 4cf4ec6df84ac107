"""Which nodes of a graph share a storage, and how large the storages are, from fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
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


def tensors_of(key: StorageKey, keys: Iterable[StorageKey]) -> list[torch.Tensor]:
    """Return the fake tensors that lie in a storage. Several results come without those in `keys`."""
    value = _at(key)
    if not isinstance(value, (tuple, list)):
        return list(cost.fake_tensors(value))
    apart = {k[1][-1] for k in keys if k[0] is key[0] and k[1] and k[1][:-1] == key[1]}
    return [tensor for index, item in enumerate(value) if index not in apart for tensor in cost.fake_tensors(item)]


def storage_size(key: StorageKey, keys: Iterable[StorageKey]) -> int:
    """Return the bytes of a storage, with the sizes that the graph was captured with. Several results: see `tensors_of`."""
    return sum(map(cost.storage_bytes, tensors_of(key, keys)))


def _at(key: StorageKey) -> Any:
    """Return the fake value that lies there: a tensor, or several."""
    owner, path = key
    value: Any = owner.meta.get("val")
    for index in path:
        value = value[index]
    return value


def bytes_at(key: StorageKey) -> int:
    """Return the bytes of all tensors that lie there."""
    return sum(map(cost.storage_bytes, cost.fake_tensors(_at(key))))
