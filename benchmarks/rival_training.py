"""Trainings by other ways to need less device memory, as a program for `examples.worker.Worker`: one way in a process.

Model, tokens, types, learning rate and optimizer (AdamW) are those of every other training. A way that cannot run here raises
CannotRun, whose message says why; the worker's last line of output then is that message.
"""

import contextlib
import importlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from examples.memory import give_free_memory_back
from examples.training import Setting, Training
from examples.worker import serve

Way = Literal["plain", "fsdp2", "compiler_offloading", "torchao", "zero_offload", "zero_infinity"]
Prepared = tuple[Any, Any]
"""What takes tokens and targets and returns the loss, and the optimizer."""
OFFLOADED_BYTES = 1 << 20
"""Activations from this size on are marked for the compiler's offloading."""


class RivalSetting(Setting):
    """A setting of another way. way: "plain" for what `Setting` itself can say: `save_on_cpu`, checkpointed layers.

    budget_bytes: the most that PyTorch's allocator may reserve on a GPU; None for no limit. folder: for files of the way.
    collectives: the backend of a process group for tensors on a GPU.
    """

    way: Way
    budget_bytes: int | None = None
    folder: str = ""
    collectives: str = "nccl"


class CannotRun(Exception):
    """This way does not run here. The message says why."""


class RivalTraining(Training):
    """A training by another way."""

    def __init__(self, setting: RivalSetting) -> None:
        self._rival = setting
        if setting.device == "cuda" and setting.budget_bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, setting.budget_bytes / total))
        super().__init__(setting)

    def _prepared(self, model: nn.Module, setting: Setting) -> Prepared:
        if self._rival.way == "plain":
            return super()._prepared(model, setting)
        return WAYS[self._rival.way](model, self._rival)

    def _free(self) -> None:
        if self._rival.way == "plain":
            super()._free()
            return
        self._run = self._optimizer = None
        self._model = nn.Module()
        give_free_memory_back()


class ZeroTraining(RivalTraining):
    """DeepSpeed's engine has the backward pass and the step."""

    def _one_step(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, Any]]:
        engine = self._run
        loss = engine(tokens, targets)
        engine.backward(loss)
        updating = self._clock()
        engine.step()
        return loss.detach(), (updating, self._clock())


# -- PyTorch's own


def fsdp2(model: nn.Module, setting: RivalSetting) -> Prepared:
    """FSDP2 with one rank: parameters, gradients and states in host memory, updated there. A layer's weights come for its use."""
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = tempfile.mkstemp(dir=setting.folder or None, prefix="rendezvous-")[1]
    Path(store).unlink()
    backend = f"cpu:gloo,cuda:{setting.collectives}" if setting.device == "cuda" else "gloo"
    init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    mesh = init_device_mesh(setting.device, (1,))
    policy = CPUOffloadPolicy(pin_memory=setting.device == "cuda")
    for layer in model.layers:  # type: ignore[union-attr]
        if setting.backend != "eager":
            layer.compile(backend=setting.backend)
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, fused=True)


def compiler_offloading(model: nn.Module, setting: RivalSetting) -> Prepared:
    """Inductor, with the compiler's offloading of activations, on a stream of its own and prefetched where it can."""
    from torch._functorch import config

    wanted = ("enable_activation_offloading", "joint_custom_pass")
    if missing := [name for name in wanted if not hasattr(config, name)]:
        raise CannotRun(f"torch {torch.__version__} has no torch._functorch.config.{missing[0]}")
    if setting.device != "cuda":
        raise CannotRun("the compiler offloads activations of a GPU only")
    config.enable_activation_offloading = True
    config.joint_custom_pass = _mark_large
    for name in ("activation_offload_separate_stream", "activation_offload_sink_wait", "activation_reload_prefetch"):
        if hasattr(config, name):
            setattr(config, name, True)
    return torch.compile(model, backend="inductor"), _adamw(model, setting)


def _mark_large(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
    """Mark all large tensors. The compiler offloads those of them that it saves for the backward pass."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() >= OFFLOADED_BYTES:
            node.meta["should_offload"] = True
    return graph


# -- other packages


def torchao(model: nn.Module, setting: RivalSetting) -> Prepared:
    """Inductor, with torchao's optimizer: states and gradients in host memory, updated there while the backward pass runs."""
    optimizers = _imported("torchao.optim")
    if setting.device != "cuda":
        raise CannotRun("torchao's CPUOffloadOptimizer copies from a GPU only")
    made = optimizers.CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=setting.learning_rate
    )
    made.state = {}  # reports count the states on the GPU, and this optimizer tells of none
    return model if setting.backend == "eager" else torch.compile(model, backend=setting.backend), made


def zero_offload(model: nn.Module, setting: RivalSetting) -> Prepared:
    """ZeRO stage 2: gradients and states in host memory, updated there by DeepSpeed's Adam. For bf16 it keeps states in fp32."""
    return _zero(model, setting, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}})


def zero_infinity(model: nn.Module, setting: RivalSetting) -> Prepared:
    """ZeRO stage 3: parameters, gradients and states in files, updated by DeepSpeed's Adam."""
    files = {"device": "nvme", "nvme_path": setting.folder, "pin_memory": True}
    return _zero(model, setting, {"stage": 3, "offload_optimizer": files, "offload_param": files})


def _zero(model: nn.Module, setting: RivalSetting, zero: dict[str, Any]) -> Prepared:
    deepspeed = _imported("deepspeed")
    if setting.device != "cuda":
        raise CannotRun("DeepSpeed's ZeRO offloads from a GPU")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()})
    config = {
        "train_micro_batch_size_per_gpu": setting.batch,
        "bf16": {"enabled": setting.dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": setting.learning_rate}},
        "zero_optimization": {"overlap_comm": True, **zero},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine, engine.optimizer


WAYS: Mapping[str, Callable[[nn.Module, RivalSetting], Prepared]] = MappingProxyType(
    {
        "fsdp2": fsdp2,
        "compiler_offloading": compiler_offloading,
        "torchao": torchao,
        "zero_offload": zero_offload,
        "zero_infinity": zero_infinity,
    }
)


def _adamw(model: nn.Module, setting: RivalSetting) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, fused=setting.device == "cuda" or setting.fused)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # packages with compiled parts fail in ways of their own
        raise CannotRun(f"{name.split('.')[0]} cannot be imported ({type(error).__name__}: {error})") from error


def begin(line: str) -> Training:
    """Begin the training of a `RivalSetting`, given as JSON."""
    setting = RivalSetting.model_validate_json(line)
    return ZeroTraining(setting) if setting.way.startswith("zero") else RivalTraining(setting)


@contextlib.contextmanager
def ended_well() -> Iterator[None]:
    """Leave the process group at the end, which would complain otherwise."""
    try:
        yield
    finally:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with ended_well():
        serve(begin)
