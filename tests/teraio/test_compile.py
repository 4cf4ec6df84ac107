"""`teraio.compile`: the model keeps its class, and trains with the same bits as without a budget."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import teraio
from teraio import backend

from ..training import MIB

BUDGET = 14 * MIB


class Stack(nn.Module):
    """Twelve weights of 1 MiB; with gradients and momentum 36 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(12))

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows).relu()
        return rows


def train(model: nn.Module, steps: int = 4) -> list[Tensor]:
    """Train from fixed weights. Return the losses."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_the_model_is_the_same_object_and_trains_with_the_same_bits(tmp_path: Path) -> None:
    expected = train(Stack())
    model = Stack()
    names = list(model.state_dict())
    returned = teraio.compile(model, memory_budget=BUDGET, storage=tmp_path, codegen="eager", fullgraph=True)
    assert returned is model and type(model) is Stack and list(model.state_dict()) == names
    assert train(model) == expected
    (status,) = teraio.status()
    assert status.device_peak_bytes <= BUDGET and status.moved_bytes["device->storage"] > 0


def test_what_inductor_computes_in_types_that_no_operator_has() -> None:
    """A unit matrix of 256 rows and more: Inductor counts them in 16 bits without a sign. DoRA of PEFT makes such ones."""

    class Turned(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows @ (torch.eye(300, dtype=rows.dtype) + torch.eye(300, 300))

    rows = torch.randn(4, 300, requires_grad=True)
    model = teraio.compile(Turned(), codegen="eager", fullgraph=True)
    model(rows).sum().backward()
    assert torch.equal(model(rows), Turned()(rows)) and rows.grad is not None


def test_stages_without_inductor_run_the_operators_of_the_model() -> None:
    """Taken apart, `silu` would be four kernels, each with a result in memory."""
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
    compiled = torch.compile(model, backend="teraio", options={"codegen": "eager"})
    rows = torch.randn(4, 8)
    compiled(rows).sum().backward()
    with torch.profiler.profile() as profiled:
        compiled(rows).sum().backward()
    ran = {event.name for event in profiled.events()}
    assert {"aten::silu", "aten::silu_backward"} <= ran and not ran & {"aten::exp", "aten::sigmoid"}


def test_a_model_whose_forward_is_pytorch_s_own(tmp_path: Path) -> None:
    """`torch.nn.Module.compile` compiles nothing of it."""
    expected = train(nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))))
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    assert train(teraio.compile(model, memory_budget=BUDGET, storage=tmp_path, codegen="eager")) == expected
    (status,) = teraio.status()
    assert status.moved_bytes["device->storage"] > 0


def test_transforms_around_a_model_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo leaves such a call out without a word."""
    model = teraio.compile(Stack(), memory_budget=BUDGET, storage=tmp_path, codegen="eager")
    train(model, steps=1)
    backend._tell_once.cache_clear()
    for _ in range(2):
        torch.func.grad(lambda rows: model(rows).square().mean())(torch.randn(16, 512))
    assert [text.split(":")[0] for text in caplog.messages if "func" in text] == [
        "torch.func.grad, vmap and the like around a compiled model run it uncompiled"
    ]


def test_stages_are_named_after_paths_in_the_model(tmp_path: Path) -> None:
    with pytest.raises(teraio.BudgetError) as caught:
        teraio.compile(Stack(), memory_budget=2 * MIB, storage=tmp_path, codegen="eager")(torch.randn(2, 512))
    assert caught.value.stage.startswith("forward/layers.0")


def test_a_copy_of_a_compiled_model_is_not_compiled(tmp_path: Path) -> None:
    model = teraio.compile(Stack(), memory_budget=BUDGET, storage=tmp_path, codegen="eager")
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(torch.randn(2, 512))
    assert teraio.status() == ()


def test_a_function_is_compiled_and_stays_as_it_is(tmp_path: Path) -> None:
    def double(rows: Tensor) -> Tensor:
        return rows + rows

    compiled = teraio.compile(double, memory_budget=BUDGET, storage=tmp_path, codegen="eager", dynamic=False)
    assert compiled is not double
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and len(teraio.status()) == 1


def test_a_mistake_is_reported_at_once() -> None:
    with pytest.raises(teraio.OptionsError, match="unknown option 'memory_budgte'"):
        teraio.compile(Stack(), memory_budgte=1)  # type: ignore[call-arg]


def test_without_options_the_environment_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"MEMORY_BUDGET": str(BUDGET), "STORAGE": str(tmp_path), "CODEGEN": "eager"}.items():
        monkeypatch.setenv(f"TERAIO_{name}", text)
    train(teraio.compile(Stack()), steps=1)
    (status,) = teraio.status()
    assert status.device_budget_bytes == BUDGET and status.moved_bytes["device->storage"] > 0


def test_a_budget_that_nothing_can_keep_is_refused() -> None:
    model = teraio.compile(Stack(), memory_budget=BUDGET, codegen="eager")
    with pytest.raises(teraio.OptionsError, match="nothing can move to keep this budget; give storage .* host_budget"):
        model(torch.randn(2, 512))
    assert teraio.status() == ()


@pytest.mark.parametrize(
    ("mode", "remedy"), [("max-autotune", "give 'max-autotune-no-cudagraphs'"), ("reduce-overhead", "leave")]
)
def test_modes_with_cuda_graphs_are_refused(mode: str, remedy: str) -> None:
    compiled = torch.compile(Stack(), backend="teraio", mode=mode)
    with pytest.raises(teraio.OptionsError, match=remedy):
        compiled(torch.randn(2, 512))


def test_the_mode_s_settings_hold_while_inductor_compiles_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx, config

    tuned = []
    compile_inner = compile_fx.compile_fx_inner

    def watched(*args: object, **kwargs: object) -> object:
        tuned.append((config.max_autotune, config.coordinate_descent_tuning))
        return compile_inner(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    compiled = torch.compile(nn.ReLU(), backend="teraio", mode="max-autotune-no-cudagraphs")
    assert torch.equal(compiled(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert tuned == [(True, True)] and not config.max_autotune
