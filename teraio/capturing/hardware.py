"""The machines of captures: descriptions of what a GPU computes and moves in a second, as JSON files, and what stands for one.

A machine that is captured for computes nothing: its description says what is measured elsewhere. The device's clock goes on by
what work is estimated to take, and its memory holds no bytes. What runs outside of compiled graphs (the loss, clipping, the
updates of optimizers) is seen operator by operator.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

import planner
from planner.errors import OptionsError, TraceError
from planner.schema import FrozenModel, Hardware, Rate, read_model
from runtime.device import MIN_MOVED_BYTES, CpuDevice, Span, WallMark
from runtime.paging import Block, NullMover
from teraio.capturing.pretended_gpu import GpuModel
from teraio.machine import Machine, ResolvedBudgets
from teraio.optimizer import HostRates, OptimizerFacts
from teraio.stages import Kernel, Speed, base_name, by_name, gpu_speed, operator_kernel, reduces_products, speed_of

Efficiency = Annotated[float, Field(gt=0, le=1)]

# Tiles of a product's result that kernels of libraries compute: rows, columns, and the share of the multiprocessor's peak that is
# left, as smaller ones load more for each operation.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.0), (128, 64, 0.92), (64, 128, 0.92), (64, 64, 0.85))
_PARTS = (1, 2, 3, 4, 6, 8)  # of the sum
_SHORTEST_SUM = 512  # of a part
_WITHOUT_TENSOR_CORES = 0.8  # the share that is left in plain fp32: loads and additions take turns


class MachineDescription(FrozenModel):
    """A machine that steps are captured for. docs/capture.md says how a kernel's time follows from it.

    flops_per_second: peak of dense matmuls by precision of the inputs: "float32", "tf32", "bfloat16", "float16". That of float32
    counts for what is not given. clock_share: the clock under load, as a share of the clock that these peaks are of.
    matmul_efficiency: the share of a multiprocessor's peak that matmuls and convolutions reach while it has work.
    attention_efficiency, attention_backward_efficiency: the same for fused attention; None: that of matmuls.
    memory_bytes_per_second: peak of the device's memory. memory_efficiency: the share of it that fused operators reach.
    cache_bytes, cache_bytes_per_second: of the cache that all multiprocessors share (L2), as reached. 0: there is none.
    launch_seconds: from one kernel's end to the next one's begin. operator_seconds: what the host needs to launch a kernel.
    gpu: the device, if it is one. None: models are captured on the CPU.
    hardware: capacities and links, as in a trace. sources: where the figures come from.
    """

    format: Literal["teraio.machine"] = "teraio.machine"
    version: Literal[1] = 1
    flops_per_second: dict[str, Rate]
    clock_share: Annotated[float, Field(gt=0)] = 1.0
    matmul_efficiency: Efficiency
    attention_efficiency: Efficiency | None = None
    attention_backward_efficiency: Efficiency | None = None
    memory_bytes_per_second: Rate
    memory_efficiency: Efficiency
    cache_bytes: Annotated[int, Field(ge=0)] = 0
    cache_bytes_per_second: Annotated[float, Field(ge=0)] = 0.0
    launch_seconds: Annotated[float, Field(ge=0)] = 0.0
    operator_seconds: Annotated[float, Field(ge=0)] = 0.0
    gpu: GpuModel | None = None
    hardware: Hardware
    sources: str = ""

    @model_validator(mode="after")
    def _float32_is_given(self) -> Self:
        if "float32" not in self.flops_per_second:
            raise ValueError(f"flops_per_second has {', '.join(self.flops_per_second) or 'no precision'}, but lacks float32")
        return self

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> MachineDescription:
        """Return a machine that comes with teraio (`known_machines`), or the one in a file.

        Raises OptionsError for an unknown name, TraceError for a damaged file.
        """
        path = Path(name_or_path)
        if path.suffix not in (".json", ".gz"):
            if str(name_or_path) not in known_machines():
                raise OptionsError(
                    f"hardware: found {str(name_or_path)!r}, wanted one of {', '.join(known_machines())}, or a JSON file"
                )
            path = Path(str(resources.files("teraio.capturing") / "machines" / f"{name_or_path}.json"))
        return read_model(path, cls, TraceError)

    def seconds(self, kernel: Kernel) -> float:
        """Return the estimated time of a kernel on the device: its arithmetic or its traffic, what is longer, and its launch."""
        return max(self.costs(kernel)) + self.launch_seconds

    def stage_seconds(self, kernels: Sequence[Kernel]) -> float:
        """Return the estimated time of kernels that the host launches one after the other. The device waits for a slower host."""
        return max(sum(map(self.seconds, kernels)), len(kernels) * self.operator_seconds)

    def speed_of(self, device: torch.device) -> Speed:
        """Return by which speed a real run on this machine would cut graphs of a device."""
        if self.gpu is None or device.type != "cuda":
            return speed_of(device)
        return gpu_speed(self.gpu.capability, self.gpu.multiprocessors, reduced=reduces_products())

    def costs(self, kernel: Kernel) -> tuple[float, float, float]:
        """Return the seconds that the arithmetic of a kernel takes, its traffic with the memory, and that with the cache."""
        own = {"attention": self.attention_efficiency, "attention backward": self.attention_backward_efficiency}
        efficiency = own.get(kernel.kind) or self.matmul_efficiency
        rate = self.peak(kernel.dtype) * self.clock_share * efficiency
        if self.gpu is not None and self.peak(kernel.dtype) == self.flops_per_second["float32"]:
            rate *= _WITHOUT_TENSOR_CORES
        arithmetic = kernel.flops / rate
        if self.gpu is not None:
            arithmetic *= kernel.whole_tiles
            if kernel.result:
                arithmetic = self._tiled_seconds(kernel, rate, self.gpu.multiprocessors)
        memory = self.memory_bytes_per_second * self.memory_efficiency
        if kernel.kind == "operator" or not (self.cache_bytes and self.cache_bytes_per_second):
            return arithmetic, kernel.touched_bytes / memory, 0.0
        # Within a graph, what fits into the cache is there from the kernels before, or goes to memory after this one has ended.
        missing = max(kernel.touched_bytes - self.cache_bytes, 0)
        return arithmetic, missing / memory, kernel.touched_bytes / self.cache_bytes_per_second

    def _tiled_seconds(self, kernel: Kernel, rate: float, multiprocessors: int) -> float:
        """Return the time of a product's arithmetic, in waves of tiles over the multiprocessors, as libraries choose the fastest.

        A multiprocessor computes one tile of the result at a time, so that the last wave leaves some idle. Small results are cut
        along the sum, too: the parts are written and added up in the cache.
        """
        matrices, rows, columns = kernel.result
        elements = matrices * rows * columns
        depth = kernel.flops / (2 * elements)
        adding = self.cache_bytes_per_second or self.memory_bytes_per_second * self.memory_efficiency
        found = math.inf
        for height, width, efficiency in _TILES:
            tiles = matrices * -(-rows // height) * -(-columns // width)
            for parts in _PARTS:
                if parts > 1 and depth < parts * _SHORTEST_SUM:
                    break
                waves = -(-tiles * parts // multiprocessors)
                computing = waves * multiprocessors * height * width * 2 * depth / (parts * rate * efficiency)
                found = min(found, computing + (2 * parts * 4 * elements / adding if parts > 1 else 0.0))
        return found

    def peak(self, dtype: torch.dtype) -> float:
        """Return the peak of matmuls in a precision, operations in a second."""
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in self.flops_per_second:
            name = "tf32"
        return self.flops_per_second.get(name) or self.flops_per_second["float32"]


def known_machines() -> list[str]:
    """Return the names of the machines that come with teraio."""
    files = resources.files("teraio.capturing").joinpath("machines").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


class ModelledDevice(CpuDevice):
    """A `Device` on which work takes the seconds that `advance` is told. Also the `MeasuredMemory` of its stages.

    now_seconds: the seconds of all work so far. allocated_bytes: 0, as everything counts from there. peak_bytes: what the stage
    that ran last has allocated, as `allocate` was told.
    """

    allocated_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0
        self.peak_bytes = 0

    def reset_peak(self) -> None:
        self.peak_bytes = 0

    def allocate(self, size_bytes: int) -> None:
        """A stage has allocated so many bytes at once, outputs included."""
        self.peak_bytes = max(self.peak_bytes, size_bytes)

    def advance(self, seconds: float) -> None:
        """Some work was done, which takes so long."""
        self.now_seconds += seconds

    def mark(self) -> WallMark:
        return WallMark(self.now_seconds)


class ResidentMover(NullMover):
    """A `Mover` that says what could leave the device. There is no budget under a capture, so nothing ever does."""

    def span(self, storage: torch.UntypedStorage, *, adopt: bool = False) -> Span | None:
        return Span(0, storage.nbytes()) if storage.nbytes() >= MIN_MOVED_BYTES else None

    def replaced(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return none: fake storages have no memory that could be another one."""
        return ()


def modelled_machine(modelled: ModelledDevice, described: planner.Hardware) -> Machine:
    """Return the `Machine` of a description. It has lower tiers, but nothing moves to them: there is no budget."""
    return Machine(
        name=described.name,
        device=modelled,
        device_memory_bytes=described.device_memory_bytes,
        budgets=ResolvedBudgets(),
        memory=modelled,
        mover=ResidentMover(),
        undo=ExitStack(),
        described=described,
    )


class DescribedHostRates(HostRates):
    """elements_per_second: how fast updates run on the host's processor; None if they cannot run there."""

    def __init__(self, elements_per_second: float | None) -> None:
        self._elements_per_second = elements_per_second

    def seconds(self, facts: OptimizerFacts, dtype: torch.dtype, elements: int) -> float | None:
        if self._elements_per_second is None or facts.off_host_because is not None:
            return None
        return elements / self._elements_per_second


class EagerWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `count` the kernel of each operator that runs within, unless `paused`. Not those inside of higher-order operators."""

    supports_higher_order_operators = True

    def __init__(self, count: Callable[[Kernel], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self._paused = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing, so that torch.compile need not leave out what runs under it."""
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if not self._paused and isinstance(func, OpOverload):
            kernel = operator_kernel(func, by_name(func, args, named), result)
            if kernel is not None:
                self._count(kernel)
        return result


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets constructors of models read values that do not depend on parameters: rates from `torch.linspace`, sizes, tables.

    Keeps the values of small fake tensors on the CPU that are made from numbers, and of what is computed from them. What is
    random or not initialised has none, so no parameter has. To be entered under a fake mode.
    """

    _MOST_ELEMENTS = 4096
    _READING = frozenset(("item", "_local_scalar_dense", "equal", "is_nonzero"))

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        given = [tensor for tensor in tree_leaves((args, named)) if isinstance(tensor, torch.Tensor)]
        if not isinstance(func, OpOverload):
            return func(*args, **named)
        drawn = torch.Tag.nondeterministic_seeded in func.tags or base_name(func).startswith(("empty", "new_empty"))
        known = not drawn and all(tensor in self._known or not is_fake(tensor) for tensor in given)
        if known and given and base_name(func) in self._READING:
            return self._computed(func, args, named)
        result = func(*args, **named)
        made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        small = all(tensor.device.type == "cpu" and tensor.numel() <= self._MOST_ELEMENTS for tensor in made)
        if known and small and (made or func._schema.is_mutable):
            for tensor, value in zip(made, tree_leaves(self._computed(func, args, named)), strict=False):
                self._known[tensor] = value
        elif func._schema.is_mutable:
            self._forget(given)
        return result

    def _forget(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget the values of tensors, and of all that share memory with them."""
        gone = {self._known[tensor].untyped_storage().data_ptr() for tensor in tensors if tensor in self._known}
        for tensor, value in list(self._known.items()):
            if value.untyped_storage().data_ptr() in gone:
                del self._known[tensor]

    def _computed(self, func: OpOverload, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        args, named = tree_map_only(torch.Tensor, lambda each: self._known.get(each, each), (args, named))
        with unset_fake_temporarily():
            return func(*args, **named)
