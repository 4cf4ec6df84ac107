"""Training of a GPT or a Llama, step by step, with measurements. The demo and the benchmarks use it."""

import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.profiler import ProfilerActivity, profile

from examples.gpt import GPT, GPTConfig
from examples.llama import LlamaConfig, llama
from examples.memory import give_free_memory_back, reset_peak, resident_bytes
from examples.sharding import shard, with_zero
from examples.text import batches, standard_library_text

Device = Literal["cpu", "cuda"]
DataType = Literal["float32", "bfloat16"]


_OF_STATUS = ("device_peak_bytes", "moved_bytes", "busy_seconds", "exposed_seconds", "late_seconds")
_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
"""Prefixes of the profiler's names for copies between a GPU and main memory."""


class Setting(BaseModel):
    """What to train and how. `options` are those of the backend. Token ids are bytes of the text, whatever the vocabulary."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["teraio", "inductor", "eager"] = "teraio"
    options: dict[str, Any] = {}
    model: Annotated[GPTConfig | LlamaConfig, Field(discriminator="kind")] = GPTConfig()
    batch: int = 8
    learning_rate: float = 3e-4
    seed: int = 1
    text_bytes: int = 4 << 20
    device: Device = "cpu"
    dtype: DataType = "float32"
    """Data type of the parameters, and so of gradients and optimizer states."""
    save_on_cpu: bool = False
    """Keep saved activations in main memory by `torch.autograd.graph.save_on_cpu`, pinned for "cuda". Meant for the backend
    "eager", because a compiled graph saves its activations only when it ends."""
    deterministic: bool = False
    """Use only deterministic operators. Without it, the order of sums in an embedding's gradient varies on CPU."""
    fused: bool | None = None
    """Use the fused optimizer. None: on a GPU only, where the default one would need memory for copies of all parameters."""
    fsdp: bool = False
    """Shard the parameters over all ranks of the process group, which trains on other text in each rank."""
    zero: bool = False
    """Keep the parameters in all ranks of the process group, and each optimizer state in one of them (ZeRO-1)."""
    ready_compiler: bool = False
    """Compile a trivial function first, so that the first step does not include the start of the compiler."""


class Step(BaseModel):
    """One iteration: loss in nats per byte, wall time, tokens, and teraio's phase ("" for another backend).

    `iterations`: of how many iterations `seconds` and `optimizer_seconds` are the mean; loss and phase are those of the last one.
    `optimizer_seconds`: the part of the time in the optimizer's step; on a GPU by the GPU's clock. `moved_bytes`, `busy_seconds`,
    `exposed_seconds`: by link since the start. `device_peak_bytes`: of tensors. `late_seconds`: of this iteration. See
    `teraio.Status`; empty and 0 for another backend.
    """

    model_config = ConfigDict(frozen=True)

    loss: float
    seconds: float
    tokens: int
    phase: str
    resident_bytes: dict[str, int]
    iterations: int = 1
    optimizer_seconds: float = 0.0
    device_peak_bytes: int = 0
    moved_bytes: dict[str, int] = {}
    busy_seconds: dict[str, float] = {}
    exposed_seconds: dict[str, float] = {}
    late_seconds: float = 0.0


class Report(BaseModel):
    """A finished run. Bytes are counted by Linux, or by the allocator for "cuda".

    `peak_bytes`: since the first step or the last reset. `rest_bytes`: memory of the process after its tensors are freed: the
    interpreter, libraries, compiled code. `peak_reserved_bytes`: for "cuda", with the memory that the allocator keeps for reuse.
    `state_bytes`: of AdamW's states in all tiers. `status`: that of teraio.
    """

    model_config = ConfigDict(frozen=True)

    peak_bytes: int
    peak_reserved_bytes: int | None = None
    rest_bytes: int
    parameters: int
    state_bytes: int = 0
    status: dict[str, Any] | None


class Training:
    """A model with its optimizer and its text."""

    def __init__(self, setting: Setting) -> None:
        if setting.ready_compiler:
            _start_compiler(setting.device)
        torch.use_deterministic_algorithms(setting.deterministic)
        torch.manual_seed(setting.seed)
        text = standard_library_text(setting.text_bytes)
        self._setting = setting
        self._on_gpu = setting.device == "cuda"
        rank = dist.get_rank() if setting.fsdp or setting.zero else 0
        self._batches = batches(text, batch=setting.batch, context=setting.model.context, seed=setting.seed + rank)
        self._model = make_model(setting)
        if setting.fsdp:
            shard(self._model, setting.device)
        self._run, self._optimizer = self._prepared(self._model, setting)
        self.reset_peak()

    def _prepared(self, model: nn.Module, setting: Setting) -> tuple[Any, Any]:
        """Return what takes tokens and targets and returns the loss, and the optimizer."""
        settings: dict[str, Any] = {"lr": setting.learning_rate, "fused": self._fused()}
        optimizer: torch.optim.Optimizer
        if setting.zero:
            model, optimizer = with_zero(model, torch.optim.AdamW, settings)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **settings)
        if setting.backend == "eager":
            return model, optimizer
        return torch.compile(model, backend=setting.backend, options=setting.options or None), optimizer

    def _fused(self) -> bool | None:
        return True if self._on_gpu and self._setting.fused is None else self._setting.fused

    def step(self) -> Step:
        """Take one step. Waits until the device has finished it."""
        return self.steps(1)

    def steps(self, count: int) -> Step:
        """Take `count` steps and return their mean. Waits for the device only before the first one and after the last one."""
        rows = [next(self._batches) for _ in range(count)]
        given = [tuple(part.to(self._setting.device) for part in row) for row in rows]
        self._wait()
        started = time.perf_counter()
        updates = []
        for tokens, targets in given:
            phase = self._phase()
            loss, update = self._one_step(tokens, targets)
            updates.append(update)
        self._wait()
        seconds = (time.perf_counter() - started) / count
        status = self._status() or {}
        return Step(
            loss=loss.item(),
            seconds=seconds,
            tokens=tokens.numel(),
            phase=phase,
            resident_bytes=resident_bytes(),
            iterations=count,
            optimizer_seconds=sum(self._between(*update) for update in updates) / count,
            **{name: status[name] for name in _OF_STATUS if name in status},
        )

    def _one_step(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, Any]]:
        """Return the loss, and when the optimizer's step began and ended."""
        with self._saving():
            loss = self._run(tokens, targets)
        loss.backward()
        updating = self._clock()
        self._optimizer.step()
        updated = self._clock()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach(), (updating, updated)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def busy_seconds(self) -> float:
        """Take one step under torch's profiler and return how long the device computed in it. Copies do not count.

        On a GPU, the time in which at least one kernel ran. On CPU, the time in which the training thread ran an operator.
        """
        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiled:
            self.step()
        return computing_seconds(profiled.events(), activity.name)

    def reset_peak(self) -> None:
        """Reset the peak. On a GPU, the allocator first frees the memory that it keeps for reuse."""
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            reset_peak()

    def wait_for_plan(self) -> None:
        """Wait until no plan is being made."""
        if self._setting.backend == "teraio":
            sys.modules["teraio"].wait_for_plan()

    def finish(self) -> Report:
        """Return the report and free all tensors. The training cannot continue."""
        peak = torch.cuda.max_memory_allocated() if self._on_gpu else resident_bytes()["VmHWM"]
        reserved = torch.cuda.max_memory_reserved() if self._on_gpu else None
        status = self._status()
        parameters = sum(parameter.numel() for parameter in self._model.parameters())
        states = [value for state in self._optimizer.state.values() for value in state.values()]
        state_bytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        del states
        self._free()
        rest = 0 if self._on_gpu else resident_bytes()["VmRSS"]
        return Report(
            peak_bytes=peak,
            peak_reserved_bytes=reserved,
            rest_bytes=rest,
            parameters=parameters,
            state_bytes=state_bytes,
            status=status,
        )

    def _clock(self) -> Any:
        """Return the time. On a GPU it is an event on the stream, so that the host does not have to wait."""
        if not self._on_gpu:
            return time.perf_counter()
        now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        now.record()
        return now

    def _between(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later) / 1e3 if self._on_gpu else later - earlier)

    def _saving(self) -> AbstractContextManager[Any]:
        if self._setting.save_on_cpu:
            return torch.autograd.graph.save_on_cpu(pin_memory=self._on_gpu)
        return nullcontext()

    def _free(self) -> None:
        if self._setting.backend == "teraio":
            sys.modules["teraio"].reset()
        self._optimizer.state.clear()
        for parameter in self._model.parameters():
            parameter.grad = None
            if not (self._setting.fsdp or self._setting.zero):
                parameter.data = torch.empty(0, device=self._setting.device)
        give_free_memory_back()

    def _status(self) -> dict[str, Any] | None:
        teraio = sys.modules.get("teraio") if self._setting.backend == "teraio" else None
        known = teraio.status() if teraio is not None else ()
        return {name: getattr(known[0], name) for name in known[0].__dataclass_fields__} if known else None

    def _phase(self) -> str:
        status = self._status()
        return status["phase"] if status else ""


def make_model(setting: Setting) -> nn.Module:
    """Return the model of `setting` on its device. It takes tokens and targets of shape (batch, time) and returns the loss."""
    dtype = getattr(torch, setting.dtype)
    if isinstance(setting.model, LlamaConfig):
        return llama(setting.model, device=setting.device, dtype=dtype)
    return GPT(setting.model).to(setting.device, dtype)


def computing_seconds(events: Iterable[Any], device: str) -> float:
    """Return the seconds in which at least one of `events` ran on "CPU" or "CUDA". Copies and annotations do not count."""
    ran = (event for event in events if event.device_type.name == device and not event.is_user_annotation)
    spans = ((event.time_range.start, event.time_range.end) for event in ran if not event.name.startswith(_COPIES))
    return covered(spans) / 1e6  # from microseconds


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _start_compiler(device: str) -> None:
    """Let Inductor load its modules and precompile its headers, for forward and backward."""
    values = torch.ones(64, 64, device=device, requires_grad=True)
    torch.compile(lambda given: (given.sin() @ given).sum())(values).backward()
    torch._dynamo.reset()
