"""Steps by subgroups: the same bits as plain PyTorch, for every optimizer; what cannot be split runs whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.errors import BudgetError
from runtime.paging import Pager
from teraio.optimizer.subgroup_sizes import SubgroupSizes

from .managed_training import ManagedTraining
from .plain_training import KIB, OPTIMIZERS, everything, random_parameters, same, set_most_gradients, state_bytes, two_groups

SUBGROUP_BYTES = 16 * KIB


@contextmanager
def stepping(parameters: list[nn.Parameter], budget_bytes: int | None = None) -> Iterator[ManagedTraining]:
    """Subgroup stepping over the parameters."""
    sizes = SubgroupSizes(given_bytes=SUBGROUP_BYTES)
    training = ManagedTraining(Pager(mover=None, budget_bytes=budget_bytes), parameters, sizes=sizes)
    try:
        yield training
    finally:
        training.steps.close()


def parameters_for(seed: int = 0) -> list[nn.Parameter]:
    """Seven of 4 KiB and two small ones; the last gets no gradient."""
    return random_parameters(((shape, torch.float32) for shape in [(32, 32)] * 7 + [(5,), (16, 4)]), seed)


def train(optimizer: Optimizer, parameters: list[nn.Parameter], scheduled: bool, steps: int = 4) -> dict[str, Tensor]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) if scheduled else None
    for step in range(steps):
        set_most_gradients(parameters, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return everything(optimizer)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_plain_pytorch(name: str, scheduled: bool) -> None:
    plain, ours = parameters_for(), parameters_for()
    expected = train(OPTIMIZERS[name](plain), plain, scheduled)
    optimizer = OPTIMIZERS[name](ours)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with stepping(ours) as steps:
        found = train(optimizer, ours, scheduled)
        names = steps.stage_names()
    assert same(found, expected)
    count = len(names) // 4
    assert 4 <= count <= 9 and names == [f"optimizer/subgroup.{number}" for number in range(count)] * 4
    assert steps.finished == [optimizer] * 4
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in before]


def needed(optimizer: Optimizer, parameters: list[nn.Parameter]) -> int:
    """Bytes of parameters, gradients and, once they exist, states."""
    own = sum(p.nbytes + (p.grad.nbytes if p.grad is not None else 0) for p in parameters)
    return own + state_bytes(optimizer)


OPTIMIZERS_WITH_MORE_STATE = {
    **OPTIMIZERS,
    "AdamW amsgrad fused": two_groups(torch.optim.AdamW, amsgrad=True, fused=True),
    "RMSprop all": two_groups(torch.optim.RMSprop, momentum=0.9, centered=True, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS_WITH_MORE_STATE)
def test_new_state_was_reserved_before_it_was_made(name: str) -> None:
    """The count never jumps over what was reserved, else the first step could break the budget."""
    parameters = parameters_for()
    set_most_gradients(parameters, 0)
    with stepping(parameters) as steps:
        optimizer = OPTIMIZERS_WITH_MORE_STATE[name](parameters)
        reserved: list[int] = []
        acquire = steps.pager.acquire

        def noting_acquire(blocks: Any, new_bytes: int, what: str, **more: Any) -> None:
            acquire(blocks, new_bytes, what, **more)
            reserved.append(steps.pager.account.used_bytes + steps.pager.account.fixed_bytes + new_bytes)

        steps.pager.acquire = noting_acquire  # type: ignore[method-assign]
        optimizer.step()
        small = 100 * len(parameters)  # step counters
        assert steps.pager.account.fixed_bytes == state_bytes(optimizer)
        assert steps.pager.account.used_bytes + steps.pager.account.fixed_bytes <= max(reserved) + small
        assert steps.pager.account.peak_bytes >= needed(optimizer, parameters) - small


@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "SGD", "SGD momentum", "AdamW amsgrad"])
def test_a_budget_that_the_state_does_not_fit_in(name: str) -> None:
    """Refused before anything is changed; the smallest budget that the error names is not too small."""
    parameters = parameters_for()
    set_most_gradients(parameters, 0)
    before = [p.detach().clone() for p in parameters]
    with stepping(parameters, budget_bytes=1 * KIB) as steps:
        optimizer = OPTIMIZERS[name](parameters)
        with pytest.raises(BudgetError) as raised:
            optimizer.step()
        assert not optimizer.state and all(map(torch.equal, before, parameters))
        assert all(block.pins == 0 for block in steps.pager.blocks)
        steps.pager.account.budget_bytes = raised.value.smallest_bytes
        optimizer.step()
        assert steps.pager.account.peak_bytes <= steps.pager.account.budget_bytes


def test_state_counts_as_resident() -> None:
    parameters = parameters_for()
    with stepping(parameters) as steps:
        optimizer = torch.optim.AdamW(parameters)
        train(optimizer, parameters, False, steps=1)
        assert steps.pager.account.fixed_bytes == state_bytes(optimizer) > 2 * 7 * 4 * KIB


def test_several_optimizers() -> None:
    plain, ours = parameters_for(), parameters_for()

    def run(parameters: list[nn.Parameter]) -> dict[str, Tensor]:
        first, second = torch.optim.AdamW(parameters[:4]), torch.optim.SGD(parameters[4:], lr=0.1)
        for step in range(2):
            set_most_gradients(parameters, step)
            first.step()
            second.step()
        return everything(first, second)

    with stepping(ours) as steps:
        found = run(ours)
        assert len(steps.finished) == 4
    assert same(found, run(plain))


def test_groups_that_are_added_later() -> None:
    def run(parameters: list[nn.Parameter]) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(parameters[:3], lr=0.1, momentum=0.9)
        set_most_gradients(parameters, 0)
        optimizer.step()
        optimizer.add_param_group({"params": parameters[3:], "lr": 0.01})
        set_most_gradients(parameters, 1)
        optimizer.step()
        return everything(optimizer)

    ours = parameters_for()
    with stepping(ours):
        found = run(ours)
    assert same(found, run(parameters_for()))


# -- what is not split


def whole(steps: ManagedTraining, optimizer: Optimizer, step: Callable[[], Any], stages: list[str]) -> None:
    """The step runs as it is, as `stages`, and ends the iteration."""
    set_most_gradients([p for group in optimizer.param_groups for p in group["params"]], 0)
    step()
    assert steps.stage_names() == stages and steps.finished == [optimizer]
    assert all(block.pins == 0 for block in steps.pager.blocks)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure(name: str) -> None:
    """It runs once, before the subgroups do, and the step returns what it does."""

    def run(parameters: list[nn.Parameter]) -> dict[str, Tensor]:
        optimizer = OPTIMIZERS[name](parameters)
        for step in range(3):
            calls: list[int] = []

            def closure(step: int = step, calls: list[int] = calls) -> float:
                assert torch.is_grad_enabled() and all(group["params"] for group in optimizer.param_groups)
                calls.append(step)
                set_most_gradients(parameters, step)
                return step + 0.5

            assert (optimizer.step(closure) if step else optimizer.step(closure=closure)) == step + 0.5 and calls == [step]
        return everything(optimizer)

    ours = parameters_for()
    with stepping(ours) as steps:
        found = run(ours)
        assert len(steps.finished) == 3 and set(steps.stage_names()) >= {"optimizer/subgroup.0", "optimizer/subgroup.1"}
    assert same(found, run(parameters_for()))


def test_an_optimizer_that_looks_at_all_parameters_at_once() -> None:
    parameters = parameters_for()[:7]
    with stepping(parameters) as steps:
        optimizer = torch.optim.LBFGS(parameters)
        whole(steps, optimizer, lambda: optimizer.step(lambda: torch.zeros(())), [])


def test_a_user_s_own_optimizer() -> None:
    class AdamW(Optimizer):
        """Has the name of one that can be split."""

        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            total = sum(float(p.grad.sum()) for p in self.param_groups[0]["params"] if p.grad is not None)
            for p in self.param_groups[0]["params"]:
                p.data.add_(total)

    parameters = parameters_for()
    with stepping(parameters) as steps:
        optimizer = AdamW(parameters)
        whole(steps, optimizer, optimizer.step, ["optimizer/whole"])


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_sees_all_parameters_and_may_change_gradients(when: str) -> None:
    seen: list[int] = []

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append(len(held))
        for p in held[:-1]:
            if when == "pre":
                p.grad.mul_(0.5)

    def run(parameters: list[nn.Parameter]) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(parameters)
        getattr(optimizer, f"register_step_{when}_hook")(hook)
        return train(optimizer, parameters, False, steps=2)

    ours = parameters_for()
    with stepping(ours) as steps:
        found = run(ours)
        assert len(steps.finished) == 2
    assert seen == [9, 9]
    assert same(found, run(parameters_for()))


def test_a_global_pre_hook_of_the_user() -> None:
    ours = parameters_for()
    seen: list[int] = []

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(sum(len(group["params"]) for group in optimizer.param_groups))

    with stepping(ours):
        handle = register_optimizer_step_pre_hook(hook)
        train(torch.optim.AdamW(ours), ours, False, steps=1)
        handle.remove()
    assert seen == [9]


def test_parameters_of_others_are_left_alone() -> None:
    ours, theirs = parameters_for(), parameters_for(1)
    with stepping(ours) as steps:
        optimizer = torch.optim.AdamW(theirs)
        train(optimizer, theirs, False, steps=1)
        assert steps.finished == [] and steps.pager.account.fixed_bytes == 0


def test_nothing_is_split_while_not_active() -> None:
    parameters = parameters_for()
    with stepping(parameters) as steps:
        steps.active = False
        optimizer = torch.optim.AdamW(parameters)
        whole(steps, optimizer, optimizer.step, [])


def test_closing_unhooks() -> None:
    parameters = parameters_for()
    with stepping(parameters) as steps:
        steps.steps.close()
        train(torch.optim.AdamW(parameters), parameters, False, steps=1)
        assert steps.finished == []


def test_sparse_gradients() -> None:
    def run(embedding: nn.Embedding, optimizer: Optimizer) -> Tensor:
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 3])).sum().backward()
            optimizer.step()
        return embedding.weight.detach().clone()

    def make() -> tuple[nn.Embedding, Optimizer]:
        torch.manual_seed(0)
        embedding = nn.Embedding(256, 8, sparse=True)
        return embedding, torch.optim.SGD(embedding.parameters(), lr=0.1)

    embedding, optimizer = make()
    with stepping([embedding.weight]):
        found = run(embedding, optimizer)
    assert torch.equal(found, run(*make()))


# -- errors


def test_an_error_in_the_middle_of_a_step() -> None:
    parameters = parameters_for()
    with stepping(parameters) as steps:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        set_most_gradients(parameters, 0)
        optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises(TypeError):
            optimizer.step()
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in parameters]
        assert steps.finished == [] and all(block.pins == 0 for block in steps.pager.blocks)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        assert steps.finished == [optimizer]


def test_a_step_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its hooks: the next one finds the parameters again, and the step that was done stays done."""
    parameters = parameters_for()
    with stepping(parameters):
        optimizer = torch.optim.AdamW(parameters)

        def interrupt() -> None:
            raise KeyboardInterrupt

        set_most_gradients(parameters, 0)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(optimizer, "_optimizer_step_code", interrupt)
            optimizer.step()
        set_most_gradients(parameters, 1)
        optimizer.step()
        found = everything(optimizer)
    others = parameters_for()
    assert same(found, train(torch.optim.AdamW(others), others, False, steps=2))
