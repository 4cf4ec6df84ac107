"""Descriptions of machines: what a GPU computes and moves in a second, as JSON files."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator

from planner.errors import OptionsError, TraceError
from planner.schema import FrozenModel, Hardware, Rate, read_model
from teraio.capturing.pretended_gpu import GpuModel
from teraio.stages import Kernel, Speed, gpu_speed, reduces_products, speed_of

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
        rate = self.peak(kernel.dtype) * self.clock_share * self._efficiency(kernel)
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

    def _efficiency(self, kernel: Kernel) -> float:
        if kernel.kind == "attention":
            return self.attention_efficiency or self.matmul_efficiency
        if kernel.kind == "attention backward":
            return self.attention_backward_efficiency or self.matmul_efficiency
        return self.matmul_efficiency

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
