"""Trainings on the emulated GPU, as a program for `examples.worker.Worker`: teraio's, plain ones and those of rivals.

What the device did since the last `reset_peak` is in the report's status under "emulated".
"""

import gc
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.rival_training import CannotRun, RivalSetting, RivalTraining, ended_well
from benchmarks.turns import first_in_line
from examples.training import Report, Step
from examples.worker import serve
from tools.made_up_cuda.emulated import device


class _Emulated(RivalTraining):
    """A training whose report tells where the device's time went."""

    def __init__(self, setting: RivalSetting) -> None:
        self._collected = [0.0, 0]
        self._iterations = 0
        self._before: dict[str, float] = {}
        super().__init__(setting)
        gc.callbacks.append(self._collect)

    def steps(self, count: int) -> Step:
        with first_in_line():
            self._iterations += count
            return super().steps(count)

    def reset_peak(self) -> None:
        """Count from here on. The allocator's cache stays as it is."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        device.times(reset=True)
        self._collected, self._iterations = [0.0, 0], 0
        self._before = self._counted()

    def finish(self) -> Report:
        after, reserved = self._counted(), torch.cuda.max_memory_reserved()
        counted = {name: (value - self._before[name]) / max(self._iterations, 1) for name, value in after.items()}
        times = {name: value / max(self._iterations, 1) for name, value in device.times().items()}
        collections = {"collect_seconds": self._collected[0] / max(self._iterations, 1), "collections": self._collected[1]}
        report = super().finish()
        emulated = {**times, **counted, **collections, "iterations": self._iterations, "reserved": reserved}
        return report.model_copy(update={"status": {**(report.status or {}), "emulated": emulated}})

    def _counted(self) -> dict[str, float]:
        """Return what has happened since the start: retries of the allocator, and how long threads waited for a processor."""
        waited = 0
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended meanwhile
                waited += int(path.read_text().split()[1])
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return {"retries": float(retries), "waited_for_processor": waited / 1e9}

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        """Time full collections of Python's garbage."""
        if info["generation"] == 2:
            now = time.perf_counter()
            self._collected[0] += now if phase == "stop" else -now
            self._collected[1] += phase == "stop"


def begin(line: str) -> Any:
    """Begin the training of a `RivalSetting`, given as JSON, on the emulated GPU that the environment names."""
    setting = RivalSetting.model_validate_json(line)
    device.install()
    if setting.way.startswith("zero"):
        raise CannotRun("DeepSpeed's Adam computes in code of its own over all of the states, which have no memory here")
    return _Emulated(setting)


if __name__ == "__main__":
    with ended_well():
        serve(begin)
