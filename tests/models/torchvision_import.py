"""timm imports torchvision, whose wheels on PyPI are built for CUDA: beside a CPU build of torch its own operators do not load.

Then the import of torchvision, and with it that of timm and transformers, ends at the first of two operators that do not exist.
None of the models here uses them, so they are declared, without a kernel: a model that calls one fails.
"""

from __future__ import annotations

import functools
import importlib.util
import sys

import torch

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache
def make_importable() -> torch.library.Library | None:
    """Declare the missing operators if torchvision is installed and needs it. The result keeps them declared."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        import torchvision  # noqa: F401

        return None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    declared = torch.library.Library("torchvision", "DEF")
    for schema in _MISSING:
        declared.define(schema)
    return declared
