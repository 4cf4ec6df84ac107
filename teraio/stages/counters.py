"""Small inputs that a graph changes, such as the running statistics of batch norm: their new values are computed last."""

from __future__ import annotations

import torch
from torch.fx import Node

from teraio.stages import cost
from teraio.stages.collectives import is_launch, is_wait


def sink_updates(stage_of: dict[Node, int], *, small_bytes: int) -> None:
    """Move what only computes new values of changed inputs into the stage that writes them, if it works on small values alone.

    The stages that it came from may run again then: they neither read nor write what the graph changes. stage_of: the stage of
    each operator, in the order of the graph.
    """
    sunk: dict[Node, int] = {}
    for node in reversed(stage_of):
        if _writes_an_input(node):
            sunk[node] = stage_of[node]
        elif node.users and all(user in sunk for user in node.users) and _is_small_work(node, small_bytes):
            sunk[node] = min(sunk[user] for user in node.users)
    stage_of.update(sunk)


def _writes_an_input(node: Node) -> bool:
    target = node.args[0] if node.args else None
    return cost.packet_name(node) == "copy_" and isinstance(target, Node) and target.op == "placeholder" and not node.users


def _is_small_work(node: Node, small_bytes: int) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable or cost.flops(node) > 0:
        return False
    if is_launch(node) or is_wait(node):
        return False
    return all(cost.output_bytes(each) < small_bytes for each in (node, *node.all_input_nodes))
