"""What users do between optimizer steps while states move: the same bits as with the unmanaged optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import teraio

from ...training import compiled, forget, states_away
from .optimizers import KINDS, MIB, STEPS, Case, Make, Run, budgeted, check, one, plain, train, unmanaged

pytestmark = pytest.mark.usefixtures("fine_and_quick")


def groups(module: nn.Module) -> list[Optimizer]:
    """Two groups of different settings, and another optimizer for a part of the parameters."""
    first, second, *others = module.parameters()
    grouped = [{"params": [first], "lr": 1e-2}, {"params": others, "weight_decay": 0.1}]
    return [torch.optim.AdamW(grouped), torch.optim.SGD([second], lr=0.1, momentum=0.9)]


def scheduled(run: Run, x: Tensor, index: int) -> None:
    """Clipped by norm or value, with a scheduler; gradients are zeroed in both ways."""
    if index == 0:
        run.kept["scheduler"] = torch.optim.lr_scheduler.StepLR(run.optimizers[0], 3, gamma=0.5)
    for half in x.chunk(2):  # two passes to an update
        run.backward(half, 0.5)
    if index % 2:
        run.values.append(nn.utils.clip_grad_norm_(run.module.parameters(), 0.05).detach().clone())
    else:
        nn.utils.clip_grad_value_(run.module.parameters(), 1e-4)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=index < STEPS // 2)
    run.kept["scheduler"].step()


def test_groups_a_scheduler_clipping_and_accumulation(tmp_path: Path) -> None:
    check(Case(make=groups, step=scheduled), tmp_path, states=5)


def changing(run: Run, x: Tensor, index: int) -> None:
    """With a gradient scaler; one step overflows and is left out. A parameter group comes later, with gradients before.

    In the end a step hook comes: the optimizer runs whole, does not fit, and reaches its states where they are.
    """
    if index == 6:
        run.optimizers[0].add_param_group({"params": list(run.module.down.parameters()), "lr": 1e-2})  # type: ignore[union-attr]
    if index == 11:
        run.optimizers[0].register_step_pre_hook(lambda *_: None)
    scaler = run.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4))
    scaler.scale((run.model(x) - x.flip(0)).square().mean()).backward()
    if index == 5:
        run.module.up[0].weight.grad[0, 0] = torch.inf  # type: ignore[index, union-attr]
    scaler.step(run.optimizers[0])
    run.module.zero_grad()
    scaler.update()
    run.values.append(torch.tensor(scaler.get_scale()))


def test_a_scaler_parameters_that_are_added_later_and_a_hook(tmp_path: Path) -> None:
    def make(module: nn.Module) -> list[Optimizer]:
        return [torch.optim.AdamW(module.up.parameters())]  # type: ignore[union-attr]

    check(Case(make=make, step=changing, steps=15), tmp_path, states=6, fraction=0.5)


def touching(run: Run, x: Tensor, index: int) -> None:
    """User code reads, writes and replaces states between the steps."""
    plain(run, x, index)
    state = run.optimizers[0].state[run.module.down[0].weight]  # type: ignore[index, union-attr]
    run.values.append(state["exp_avg"][3].clone())
    state["exp_avg_sq"].mul_(1.5)
    if index == 7:
        state["exp_avg"] = state["exp_avg"].clone() * 2


def test_user_code_touches_states(tmp_path: Path) -> None:
    check(Case(make=one(torch.optim.AdamW), step=touching, planned=True, steps=12), tmp_path, states=6)


# -- checkpoints


def save(run: Run) -> None:
    content = {"model": run.module.state_dict(), "optimizer": run.optimizers[0].state_dict()}
    torch.save(content, run.folder / "checkpoint.pt")


def load(run: Run) -> None:
    content = torch.load(run.folder / "checkpoint.pt")
    run.module.load_state_dict(content["model"])
    run.optimizers[0].load_state_dict(content["optimizer"])


def saving(run: Run, x: Tensor, index: int) -> None:
    """Saves after half of the steps."""
    plain(run, x, index)
    if index == STEPS // 2 - 1:
        save(run)


def resuming(run: Run, x: Tensor, index: int) -> None:
    """Begins where `saving` saved, with new objects, and takes the second half of the steps."""
    if index < STEPS // 2:
        return
    if index == STEPS // 2:
        load(run)
        teraio.manage_optimizer(run.optimizers[0])
    plain(run, x, index)


@pytest.fixture(params=["AdamW", "SGD momentum"])
def kind(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


def test_checkpoints_in_both_directions(kind: Make, tmp_path: Path) -> None:
    """Managed to plain, plain to managed; each ends where a training that was not interrupted does."""
    straight = unmanaged(Case(make=one(kind), step=saving), tmp_path)
    managed = budgeted(Case(make=one(kind)), tmp_path, int(0.45 * straight.status.device_peak_bytes))
    second_half = straight.values[STEPS // 2 :]
    resumed = train(Case(make=one(kind), step=resuming_managed), tmp_path, managed)
    assert resumed.moved_states and all(map(torch.equal, resumed.values, second_half))
    saved = train(Case(make=one(kind), step=saving), tmp_path, managed)
    assert saved.moved_states and all(map(torch.equal, saved.values, straight.values))
    back = train(Case(make=one(kind), step=resuming), tmp_path, {"optimizer": "off"})
    assert len(back.values) == len(second_half) and all(map(torch.equal, back.values, second_half))


def resuming_managed(run: Run, x: Tensor, index: int) -> None:
    """As `resuming`, without any call of teraio's."""
    if index == STEPS // 2:
        load(run)
    if index >= STEPS // 2:
        plain(run, x, index)


def going_back(run: Run, x: Tensor, index: int) -> None:
    """Loads in the middle of the planned training what was saved before."""
    plain(run, x, index)
    if index == 2:
        save(run)
    if index == 7:
        load(run)


def test_loading_in_the_middle(tmp_path: Path) -> None:
    check(Case(make=one(torch.optim.AdamW), step=going_back, planned=True, steps=12), tmp_path, states=6)


# -- the rest


def resetting(run: Run, x: Tensor, index: int) -> None:
    """`teraio.reset` brings all states back; the same objects train on, compiled anew."""
    plain(run, x, index)
    if index == 4:
        before = [value.clone() for value in run.optimizers[0].state[run.module.up[0].weight].values()]  # type: ignore[index, union-attr]
        run.training.states_moved |= states_away()
        forget()
        after = run.optimizers[0].state[run.module.up[0].weight].values()  # type: ignore[index, union-attr]
        assert all(map(torch.equal, before, after))
        run.training.model = compiled(run.module, run.options)


def test_resetting_in_the_middle(tmp_path: Path) -> None:
    case = Case(make=one(torch.optim.AdamW), step=resetting, steps=8)
    expected = train(case, tmp_path, {"optimizer": "off"})
    found = train(case, tmp_path, budgeted(case, tmp_path, int(0.45 * expected.status.device_peak_bytes)))
    assert len(found.moved_states) >= 6 and all(map(torch.equal, found.values, expected.values))


def test_states_stay_where_the_option_says_so(tmp_path: Path) -> None:
    """Parameters, gradients and activations move all the same."""
    case = Case(make=one(torch.optim.AdamW), steps=6)
    expected = unmanaged(case, tmp_path)
    options = budgeted(case, tmp_path, int(0.8 * expected.status.device_peak_bytes))
    found = train(case, tmp_path, {**options, "optimizer": "off"})
    assert found.moved_states == set() and found.status.moved_bytes["device->storage"] > 0
    assert all(map(torch.equal, found.values, expected.values))


def test_an_optimizer_that_is_given_by_hand(tmp_path: Path) -> None:
    def make(module: nn.Module) -> list[Optimizer]:
        optimizer = torch.optim.AdamW(module.parameters())
        teraio.manage_optimizer(optimizer)
        return [optimizer]

    case = Case(make=make, steps=6)
    expected = unmanaged(Case(make=one(torch.optim.AdamW), steps=6), tmp_path)
    options = budgeted(case, tmp_path, int(0.45 * expected.status.device_peak_bytes))
    found = train(case, tmp_path, {**options, "optimizer": "off"})
    assert len(found.moved_states) >= 6 and all(map(torch.equal, found.values, expected.values))


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(teraio.UnsupportedError, match="found dict, wanted a torch.optim.Optimizer"):
        teraio.manage_optimizer({})  # type: ignore[arg-type]


def test_no_room_for_states_on_the_drives(tmp_path: Path) -> None:
    """Refused before the first update changes a parameter."""
    changed: list[bool] = []

    def step(run: Run, x: Tensor, index: int) -> None:
        before = [p.detach().clone() for p in run.module.parameters()]
        run.backward(x)
        try:
            run.optimizers[0].step()
        finally:
            changed.append(not all(map(torch.equal, before, run.module.parameters())))

    case = Case(make=one(torch.optim.AdamW), layers=6, steps=1, step=step)
    options = budgeted(case, tmp_path, 16 * MIB)
    with pytest.raises(teraio.StorageFullError, match="storage_budget"):
        train(case, tmp_path, {**options, "storage_budget": 14 * MIB})
    assert changed == [False]
