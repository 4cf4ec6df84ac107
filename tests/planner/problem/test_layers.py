"""Which layer a stage belongs to, by its name."""

from __future__ import annotations

import pytest

from planner.problem import layer_of


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("forward/layers.3.mlp.up", "forward/layers.3"),
        ("backward#3/layers.3.{qkv,proj}:2", "backward#3/layers.3"),
        ("forward/layers.3:2", "forward/layers.3"),
        ("forward/layers.0..layers.1", "forward/layers.0"),
        ("forward/stages.0.blocks.3.{conv_dw,mlp.fc1}", "forward/stages.0.blocks.3"),
        ("forward/stages.0.blocks.0..stages.0.blocks.1", "forward/stages.0"),
        ("forward/layers.3.mlp.0", "forward/layers.3"),
        ("forward/features.1.0.block.5", "forward/features.1.0"),
        ("forward/0", "forward/0"),
        ("forward/root", None),
        ("forward/head", None),
    ],
)
def test_the_layer_of_a_stage(name: str, layer: str | None) -> None:
    assert layer_of(name) == layer
