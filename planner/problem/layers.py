"""Which layer of a model a stage belongs to, by its name."""

from __future__ import annotations

import re

# An index, and each index further inside, with or without a name before it, as long as there is something inside it.
_LAYER = re.compile(r"(.*?[./]\d+(?:(?:\.[^.\d{:][^.{:]*)?\.\d+(?=\.[^.]))*)(?:[./:]|$)")


def layer_of(name: str) -> str | None:
    """Return the beginning of a stage's name that is its layer's; None if it is in no layer.

    It ends with the first index (`forward/layers.3` for `forward/layers.3.mlp.up`). Layers right inside a layer count by
    themselves: `stages.0.blocks.3` for `stages.0.blocks.3.mlp.fc1`. A module without modules inside it is no layer there, such
    as a part of a sequence: `layers.3` for `layers.3.mlp.0`.
    """
    found = _LAYER.match(name)
    return found[1] if found is not None else None
