"""Descriptions of machines: what a GPU computes and moves in a second, as JSON files."""

from __future__ import annotations

import os
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


class MachineDescription(FrozenModel):
    """A machine that steps are captured for.

    flops_per_second: peak of dense matmuls by precision of the inputs: "float32", "tf32", "bfloat16", "float16". That of float32
    counts for what is not given.
    matmul_efficiency: the share of it that large matmuls, convolutions and attention reach. memory_bytes_per_second: peak of the
    device's memory. memory_efficiency: the share of it that fused operators reach. launch_seconds: least time of a kernel.
    gpu: the device, if it is one. None: models are captured on the CPU.
    hardware: capacities and links, as in a trace. sources: where the figures come from.
    """

    format: Literal["teraio.machine"] = "teraio.machine"
    version: Literal[1] = 1
    flops_per_second: dict[str, Rate]
    matmul_efficiency: Efficiency
    memory_bytes_per_second: Rate
    memory_efficiency: Efficiency
    launch_seconds: Annotated[float, Field(ge=0)] = 0.0
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
        return read_model(path, cls, format_name="teraio.machine", version=1, error=TraceError)

    def seconds(self, kernel: Kernel) -> float:
        """Return the estimated duration of a kernel: that of its arithmetic or of its memory traffic, whichever is longer."""
        return max(*self.costs(kernel), self.launch_seconds)

    def speed_of(self, device: torch.device) -> Speed:
        """Return by which speed a real run on this machine would cut graphs of a device."""
        if self.gpu is None or device.type != "cuda":
            return speed_of(device)
        return gpu_speed(self.gpu.capability, self.gpu.multiprocessors, reduced=reduces_products())

    def costs(self, kernel: Kernel) -> tuple[float, float]:
        """Return the seconds that the arithmetic of a kernel takes, and those of its memory traffic."""
        arithmetic = kernel.flops / (self._peak(kernel.dtype) * self.matmul_efficiency)
        traffic = kernel.touched_bytes / (self.memory_bytes_per_second * self.memory_efficiency)
        return arithmetic, traffic

    def _peak(self, dtype: torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        if name == "float32" and torch.get_float32_matmul_precision() != "highest" and "tf32" in self.flops_per_second:
            name = "tf32"
        return self.flops_per_second.get(name) or self.flops_per_second["float32"]


def known_machines() -> list[str]:
    """Return the names of the machines that come with teraio."""
    files = resources.files("teraio.capturing").joinpath("machines").iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))
