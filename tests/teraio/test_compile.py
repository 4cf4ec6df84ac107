"""`teraio.compile`: the model keeps its class, and trains with the same bits as without a budget; also if compiled again."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, config

import teraio
from teraio import backend
from teraio.registry import REGISTRY
from teraio.training_run import TrainingRun, one_thread

from ..training import MIB, unequal, weights_of_1_mib

pytestmark = pytest.mark.usefixtures("finely_cut", "quick_links")


def stack(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    """Four weights of 1 MiB: with gradients and Adam's states 16 MiB. The biases are too small to move."""
    torch.manual_seed(0)
    return kind(*(nn.Linear(512, 512) for _ in range(4)))


class Stack(nn.Sequential):
    """With a forward of its own; of PyTorch's, `torch.nn.Module.compile` compiles nothing."""

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self:
            rows = layer(rows)
        return rows


def train(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, first: int = 0, steps: int = 3) -> list[Tensor]:
    """Return the losses."""
    losses = []
    for step in range(first, first + steps):
        loss = model(torch.randn(16, 512, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert teraio.wait_for_plan(60)
        losses.append(loss.detach())
    return losses


def options(folder: Path, mib: int) -> dict[str, Any]:
    return {"memory_budget": mib * MIB, "storage": str(folder), "codegen": "eager"}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("kind", [Stack, nn.Sequential])
def test_the_model_is_the_same_object_and_trains_with_the_same_bits(kind: type[nn.Sequential], tmp_path: Path) -> None:
    plain, model = stack(kind), stack(kind)
    expected = train(plain, adam(plain))
    returned = teraio.compile(model, **options(tmp_path, 8), fullgraph=True)
    assert returned is model and type(model) is kind and list(model.state_dict()) == list(plain.state_dict())
    assert train(model, adam(model)) == expected
    (status,) = teraio.status()
    assert status.device_peak_bytes <= 8 * MIB and status.moved_bytes["device->storage"] > 0


def test_what_inductor_computes_in_types_that_no_operator_has() -> None:
    """A unit matrix of 256 rows and more: Inductor counts them in 16 bits without a sign. DoRA of PEFT makes such ones."""

    class Turned(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return rows @ (torch.eye(300, dtype=rows.dtype) + torch.eye(300, 300))

    rows = torch.randn(4, 300, requires_grad=True)
    model = teraio.compile(Turned(), codegen="eager", fullgraph=True)
    model(rows).sum().backward()
    assert torch.equal(model(rows), Turned()(rows)) and rows.grad is not None


def test_transforms_around_a_model_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo leaves such a call out without a word."""
    model = teraio.compile(stack(), **options(tmp_path, 8))
    model(torch.randn(16, 512)).sum().backward()
    backend._tell_once.cache_clear()
    for _ in range(2):
        torch.func.grad(lambda rows: model(rows).square().mean())(torch.randn(16, 512))
    assert [text.split(":")[0] for text in caplog.messages if "func" in text] == [
        "torch.func.grad, vmap and the like around a compiled model run it uncompiled"
    ]


def test_a_copy_of_a_compiled_model_is_not_compiled(tmp_path: Path) -> None:
    model = teraio.compile(stack(), **options(tmp_path, 8))
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(torch.randn(2, 512))
    assert teraio.status() == ()


def test_a_function_is_compiled_and_stays_as_it_is(tmp_path: Path) -> None:
    def double(rows: Tensor) -> Tensor:
        return rows + rows

    compiled = teraio.compile(double, **options(tmp_path, 8), dynamic=False)
    assert compiled is not double
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and len(teraio.status()) == 1


def test_without_options_the_environment_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in options(tmp_path, 7).items():
        monkeypatch.setenv(f"TERAIO_{name.upper()}", str(value))
    model = teraio.compile(stack())
    train(model, adam(model), steps=1)
    (status,) = teraio.status()
    assert status.device_budget_bytes == 7 * MIB and status.moved_bytes["device->storage"] > 0


def test_refusals(tmp_path: Path) -> None:
    """A mistake is reported at once, what cannot be kept at the first call. Stages are named after paths in the model."""
    with pytest.raises(teraio.OptionsError, match="unknown option 'memory_budgte'"):
        teraio.compile(stack(), memory_budgte=1)  # type: ignore[call-arg]
    with pytest.raises(teraio.OptionsError, match="nothing can move to keep this budget; give storage .* host_budget"):
        teraio.compile(stack(), memory_budget=3 * MIB, codegen="eager")(torch.randn(2, 512))
    assert teraio.status() == ()
    with pytest.raises(teraio.BudgetError) as caught:
        teraio.compile(Stack(stack()), **options(tmp_path, 1))(torch.randn(2, 512))
    assert caught.value.stage.startswith(("forward/0.", "backward/0."))
    for mode, remedy in (("max-autotune", "give 'max-autotune-no-cudagraphs'"), ("reduce-overhead", "leave")):
        with pytest.raises(teraio.OptionsError, match=remedy):
            torch.compile(stack(), backend="teraio", mode=mode)(torch.randn(2, 512))


def test_the_mode_s_settings_hold_while_inductor_compiles_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []
    compile_inner = compile_fx.compile_fx_inner

    def watched(*args: object, **kwargs: object) -> object:
        tuned.append((config.max_autotune, config.coordinate_descent_tuning))
        return compile_inner(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(compile_fx, "compile_fx_inner", watched)
    compiled = torch.compile(nn.ReLU(), backend="teraio", mode="max-autotune-no-cudagraphs")
    assert torch.equal(compiled(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert tuned == [(True, True)] and not config.max_autotune


def test_what_another_thread_compiles_or_runs_meanwhile_is_refused(tmp_path: Path) -> None:
    compiled = weights_of_1_mib(options(tmp_path, 8), count=2)
    compiled.model(torch.randn(16, 512))
    fresh = weights_of_1_mib(options(tmp_path, 8), count=3)
    told: list[str] = []

    def call() -> None:
        for training in (compiled, fresh):
            try:
                training.model(torch.randn(16, 512))
            except teraio.UnsupportedError as error:
                told.append(str(error))

    def in_a_thread() -> None:
        thread = threading.Thread(target=call, name="other")
        thread.start()
        thread.join()

    with one_thread(), one_thread():
        in_a_thread()
    assert [text.split(":")[0] for text in told] == ["thread 'other' compiles or runs a model while another thread does"] * 2
    told.clear()
    torch._dynamo.reset()
    in_a_thread()
    assert not told
    fresh.finish()


# -- compiled again with other options: the new run takes over


def in_place(model: nn.Module, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return teraio.compile(model, **given)


def as_another_object(model: nn.Module, given: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="teraio", options=given)


PLANNED = 5
"""So many steps are enough to come to the phase planned."""


@pytest.mark.parametrize(("compiled", "before", "after", "steps"), [(in_place, 10, 7, PLANNED), (as_another_object, 7, 100, 3)])
def test_the_new_budget_holds_and_the_bits_are_the_same(
    compiled: Callable[..., Any], before: int, after: int, steps: int, tmp_path: Path
) -> None:
    plain, model = stack(), stack()
    expected = train(plain, adam(plain), 0, 2 * steps)
    optimizer = adam(model)
    found = train(compiled(model, options(tmp_path, before)), optimizer, 0, steps)
    found += train(compiled(model, options(tmp_path, after)), optimizer, steps, steps)

    (new,) = teraio.status()
    assert found == expected and not unequal(list(model.parameters()), list(plain.parameters()))
    assert new.device_budget_bytes == after * MIB >= new.device_peak_bytes
    assert (new.moved_bytes["device->storage"] > 0) is (after < 16)


def test_a_backward_pass_that_is_due_still_runs(tmp_path: Path) -> None:
    model, plain, rows = stack(), stack(), torch.randn(16, 512)
    plain(rows).sum().backward()
    due = as_another_object(model, options(tmp_path, 10))(rows).sum()
    with torch.no_grad():
        as_another_object(model, options(tmp_path, 7))(rows)
    due.backward()
    gradients, expected = ([p.grad for p in each.parameters() if p.grad is not None] for each in (model, plain))
    assert not unequal(gradients, expected)


def test_what_was_compiled_before_is_refused(tmp_path: Path) -> None:
    """Also if Dynamo still knows it: the third call of torch.compile here makes nothing new."""
    model, rows = stack(), torch.randn(16, 512)
    for mib in (10, 7):
        as_another_object(model, options(tmp_path, mib))(rows)
    third = as_another_object(model, options(tmp_path, 10))
    with pytest.raises(teraio.UnsupportedError, match=r"compiled again .* torch\._dynamo\.reset\(\)"):
        third(rows)
    in_place(model, options(tmp_path, 10))(rows)
    (status,) = teraio.status()
    assert status.device_budget_bytes == 10 * MIB


@pytest.mark.parametrize("shared", [False, True])
def test_two_budgets_on_two_models(shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where they share a parameter, which the first one manages."""
    models, plain = [stack(), stack()], stack()
    if shared:
        models[1][0].weight = models[0][0].weight
    for model, mib in zip(models, (7, 8), strict=True):
        teraio.compile(model, **options(tmp_path, mib))(torch.randn(16, 512))
    assert [status.device_budget_bytes for status in teraio.status()] == [7 * MIB, 8 * MIB]
    said = "1 of 4 large parameters of this graph are managed under the budget of 7,340,032 bytes"
    assert (said in caplog.text) is shared and ("teraio.reset()" in caplog.text) is shared
    if not shared:
        expected = train(plain, adam(plain))
        assert [train(model, adam(model)) for model in models] == [expected, expected]


def test_all_runs_end_even_if_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the blocks of the other would stay in lower tiers, and nobody would know of its run any more."""
    model, rows = stack(), torch.randn(16, 512)
    for half, mib in ((model[:2], 8), (model[2:], 9)):
        as_another_object(half, options(tmp_path, mib))(rows)
    runs = REGISTRY.runs()
    close, ended = TrainingRun.close, []

    def failing(run: TrainingRun, *, replaced: bool = False) -> None:
        ended.append(run)
        close(run, replaced=replaced)
        if run is runs[1]:
            raise teraio.StorageError("a drive is broken")

    monkeypatch.setattr(TrainingRun, "close", failing)
    with pytest.raises(teraio.StorageError, match="a drive is broken"):
        teraio.reset()
    assert {*ended} == {*runs} and len(runs) == 2 and teraio.status() == ()


def test_nothing_is_kept_of_the_run_before_and_dynamo_s_limit_is_not_used_up(tmp_path: Path) -> None:
    model, rows = stack(), torch.randn(16, 512)
    runs = []
    with torch._dynamo.config.patch(recompile_limit=1):
        for mib in (10, 7, 8):
            in_place(model, options(tmp_path, mib))(rows).sum().backward()
            (status,) = teraio.status()
            assert status.device_budget_bytes == mib * MIB
            runs += [weakref.ref(run) for run in REGISTRY.runs()]
    gc.collect()
    assert [run() is not None for run in runs] == [False, False, True]
