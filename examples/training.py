"""One training run of the GPT, step by step: what the demo and the benchmarks measure."""

import sys
import time
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from examples.gpt import GPT, GPTConfig
from examples.memory import give_free_memory_back, reset_peak, resident_bytes
from examples.text import batches, standard_library_text


class Setting(BaseModel):
    """What to train and how; `options` are the backend's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["teraio", "inductor", "eager"] = "teraio"
    options: dict[str, Any] = {}
    model: GPTConfig = GPTConfig()
    batch: int = 8
    learning_rate: float = 3e-4
    seed: int = 1
    text_bytes: int = 4 << 20
    device: Literal["cpu", "cuda"] = "cpu"
    deterministic: bool = False
    """Use PyTorch's deterministic operators only: on CPU an embedding's gradient is summed in varying order otherwise."""
    ready_compiler: bool = False
    """Compile something trivial first, so that the first step does not pay for the compiler's start."""


class Step(BaseModel):
    """One iteration: its loss in nats per byte, its wall time and teraio's phase ("" for another backend)."""

    model_config = ConfigDict(frozen=True)

    loss: float
    seconds: float
    phase: str
    resident_bytes: dict[str, int]


class Report(BaseModel):
    """A finished run; bytes as Linux saw them, or for "cuda" as the allocator did.

    `peak_bytes` since the first step or the last reset; `rest_bytes` is what the process still takes once its
    tensors are freed: the interpreter, the libraries, the compiled code. `status` is teraio's own account.
    """

    model_config = ConfigDict(frozen=True)

    peak_bytes: int
    rest_bytes: int
    parameters: int
    status: dict[str, Any] | None


class Training:
    """A model, its optimizer and its text, ready to take steps."""

    def __init__(self, setting: Setting) -> None:
        if setting.ready_compiler:
            _start_compiler(setting.device)
        torch.use_deterministic_algorithms(setting.deterministic)
        torch.manual_seed(setting.seed)
        text = standard_library_text(setting.text_bytes)
        self._setting = setting
        self._batches = batches(text, batch=setting.batch, context=setting.model.context, seed=setting.seed)
        self._model = GPT(setting.model).to(setting.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=setting.learning_rate)
        if setting.backend == "eager":
            self._run: Any = self._model
        else:
            self._run = torch.compile(self._model, backend=setting.backend, options=setting.options or None)
        self.reset_peak()

    def step(self) -> Step:
        """Takes one step; blocks until it has finished on the device."""
        phase = self._phase()
        tokens, targets = (part.to(self._setting.device) for part in next(self._batches))
        started = time.perf_counter()
        loss = self._run(tokens, targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._setting.device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return Step(loss=loss.item(), seconds=seconds, phase=phase, resident_bytes=resident_bytes())

    def reset_peak(self) -> None:
        """Forgets the peak so far."""
        if self._setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak()

    def wait_for_plan(self) -> None:
        """Blocks while a plan is being made."""
        if self._setting.backend == "teraio":
            sys.modules["teraio"].wait_for_plan()

    def finish(self) -> Report:
        """Reads the peak, then frees every tensor; the training cannot go on."""
        on_gpu = self._setting.device == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()["VmHWM"]
        status = self._status()
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        self._free()
        rest = 0 if on_gpu else resident_bytes()["VmRSS"]
        return Report(peak_bytes=peak, rest_bytes=rest, parameters=parameters, status=status)

    def _free(self) -> None:
        if self._setting.backend == "teraio":
            sys.modules["teraio"].reset()
        self._optimizer.state.clear()
        for parameter in self._model.parameters():
            parameter.grad = None
            parameter.data = torch.empty(0, device=self._setting.device)
        give_free_memory_back()

    def _status(self) -> dict[str, Any] | None:
        if self._setting.backend != "teraio":
            return None
        status = sys.modules["teraio"].status()[0]
        return {name: getattr(status, name) for name in status.__dataclass_fields__}

    def _phase(self) -> str:
        teraio = sys.modules.get("teraio") if self._setting.backend == "teraio" else None
        known = teraio.status() if teraio is not None else ()
        return known[0].phase if known else ""


def _start_compiler(device: str) -> None:
    """Has Inductor load its modules and prepare its headers, forward and backward."""
    values = torch.ones(64, 64, device=device, requires_grad=True)
    torch.compile(lambda given: (given.sin() @ given).sum())(values).backward()
    torch._dynamo.reset()
