"""A GPU for captures on machines that have none: tensors on "cuda", the answers of `torch.cuda`, a GPU's attention.

With a GPU, all of this does nothing: PyTorch knows better.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn, Self
from unittest import mock

import torch
from pydantic import Field
from torch import Tensor
from torch._subclasses import FakeTensorMode

from planner.errors import UnsupportedError
from planner.schema import FrozenModel
from runtime.system import missing_gpu

_FLASH_CAPABILITY = (8, 0)
_MOST_FLASH_WIDTH = 256


class GpuModel(FrozenModel):
    """What `torch.cuda.get_device_properties` says of a GPU. Stages are cut by it, see `teraio.stages.cost`."""

    capability: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]
    multiprocessors: Annotated[int, Field(gt=0)]


class _Generator:
    """The GPU's generator, as checkpointed regions with attention or dropout use it. It draws nothing and has no state."""

    device = torch.device("cuda", 0)

    def get_state(self) -> Self:
        return self

    def set_state(self, state: object) -> Self:
        return self

    clone_state = graphsafe_get_state = get_state
    manual_seed = graphsafe_set_state = set_state


@contextlib.contextmanager
def pretended_gpu(gpu: GpuModel | None) -> Iterator[None]:
    """Let fake tensors be on "cuda" within the block, as on this GPU (None: some recent one).

    What only a driver can do raises UnsupportedError, as does a machine without a C++ compiler.
    """
    if torch.cuda.is_available():
        yield
        return
    from torch._inductor import config

    capability = _FLASH_CAPABILITY if gpu is None else gpu.capability
    with (
        missing_gpu(),
        _attention_of(capability),
        # Both would compute on the GPU while a graph is compiled: constants, and which shapes of matmuls are faster.
        config.patch(joint_graph_constant_folding=False, shape_padding=False),
        # Tracing would copy the values of small constants to the GPU.
        mock.patch("torch.fx.experimental.proxy_tensor.CONSTANT_NUMEL_LIMIT", -1),
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False),
        mock.patch.multiple(
            torch.cuda,
            default_generators=(_Generator(),),
            is_bf16_supported=lambda including_emulation=True: capability >= _FLASH_CAPABILITY,
            set_device=lambda device: None,
            synchronize=lambda device=None: None,
            _lazy_init=_no_driver,
        ),
    ):
        yield


@contextlib.contextmanager
def answering(gpu: GpuModel | None, name: str) -> Iterator[None]:
    """Say within the block that there is such a GPU, to code that chooses a device. None: say what is true.

    Not for code that is compiled: PyTorch asks, too, and then calls the driver.
    """
    if gpu is None or torch.cuda.is_available():
        yield
        return
    with (
        # From that answer, PyTorch would conclude that it can copy the values of `torch.tensor` to the GPU.
        mock.patch.object(FakeTensorMode, "avoid_device_init", new=True, create=True),
        # Nor is there one to wake up before its first tensor.
        mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None, create=True),
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_capability=lambda device=None: gpu.capability,
            get_device_name=lambda device=None: name,
        ),
    ):
        yield


def _no_driver() -> NoReturn:
    raise UnsupportedError(
        "the step needs the driver of a GPU, and this machine has none; leave streams, events, generators and pinned memory out "
        "of the captured step, or capture it on a machine with a GPU"
    )


@contextlib.contextmanager
def _attention_of(capability: tuple[int, int]) -> Iterator[None]:
    """Let attention on "cuda" be the kernel that PyTorch would choose there: a build without CUDA takes none of them."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        tensors, aten = (query, key, value), torch.ops.aten
        if _takes_flash(tensors, attn_mask, capability):
            made = aten._scaled_dot_product_flash_attention(*tensors, dropout_p, is_causal, scale=scale)
        elif _takes_efficient(tensors, attn_mask, capability):
            saves = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            bias = _as_bias(attn_mask, query, key)
            made = aten._scaled_dot_product_efficient_attention(*tensors, bias, saves, dropout_p, is_causal, scale=scale)
        else:
            plain = aten._scaled_dot_product_attention_math
            made = plain(*tensors, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)
        return made[0]  # type: ignore[no-any-return]

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()


def _takes_flash(tensors: tuple[Tensor, ...], mask: Tensor | None, capability: tuple[int, int]) -> bool:
    widths = {tensor.shape[-1] for tensor in tensors}
    return (
        torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        and capability >= _FLASH_CAPABILITY
        and mask is None
        and all(tensor.ndim == 4 and tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
        and len(widths) == 1
        and all(width % 8 == 0 and width <= _MOST_FLASH_WIDTH for width in widths)
    )


def _takes_efficient(tensors: tuple[Tensor, ...], mask: Tensor | None, capability: tuple[int, int]) -> bool:
    short = all(tensor.dtype == torch.bfloat16 for tensor in tensors)
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
        and (mask is None or not mask.requires_grad)
        and all(tensor.ndim == 4 and tensor.shape[1] == tensors[0].shape[1] for tensor in tensors)
        and (not short or capability >= _FLASH_CAPABILITY)
        and all(tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) for tensor in tensors)
    )


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return what is added to the scores: (batch, heads, queries, keys)."""
    if mask is None:
        return None
    bias = mask if mask.dtype != torch.bool else torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
