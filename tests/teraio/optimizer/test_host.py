"""What updates on the host know of a device's small states, and what keeps an optimizer from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from teraio.optimizer import OptimizerFacts, owned_parameters
from teraio.optimizer.host import HostCounters, HostUpdates


class OnDevice(Tensor):
    """A tensor of main memory that says it is elsewhere. `copies`, `copies_back`: how often it was copied from and to there."""

    copies = copies_back = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def cpu(self) -> Tensor:  # type: ignore[override]
        OnDevice.copies += 1
        return self.as_subclass(Tensor).clone()

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        OnDevice.copies_back += 1
        return super().copy_(source, non_blocking)


@pytest.fixture
def state() -> Tensor:
    OnDevice.copies = OnDevice.copies_back = 0
    return torch.zeros(()).as_subclass(OnDevice)


def test_a_counter_is_copied_from_the_device_once(state: Tensor) -> None:
    counters = HostCounters()
    for step in range(3):
        here = counters.here(state)
        assert here == step
        here += 1
        counters.update([(state, here)])
    assert state == 3 and OnDevice.copies == 1 and OnDevice.copies_back == 0


@pytest.mark.parametrize("begun", [False, True])
def test_a_counter_that_the_device_has_counted_is_copied_again(state: Tensor, begun: bool) -> None:
    """An update that does not get its blocks is made there, which changes the counter as often as to copy it back does."""
    counters = HostCounters()
    for step in range(3):
        here = counters.here(state)
        assert here == step
        if begun:
            here += 7  # it has failed half-way, say
        torch._foreach_add_([state], 1)
    here = counters.here(state)
    assert here == 3
    here += 1
    counters.update([(state, here)])
    assert state == 4


def test_counters_of_many_parameters_are_written_by_a_kernel_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int, float]] = []
    add = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda states, value: (added.append((len(states), value)), add(states, value)))
    OnDevice.copies_back = 0
    states = [torch.tensor(value).as_subclass(OnDevice) for value in (4.0, 4.0, 0.1, 4.0)]
    averages = torch.zeros(3).as_subclass(OnDevice)
    counters = HostCounters()
    pairs = [(state, counters.here(state)) for state in (*states, averages)]
    for _, here in pairs:
        here += 1
    counters.update(pairs)
    assert [state.item() for state in states] == [5.0, 5.0, torch.tensor(0.1) + 1, 5.0] and averages.tolist() == [1, 1, 1]
    assert [count for count, _ in added] == [3, 1] and OnDevice.copies_back == 1, "only what is no number is copied"
    assert all(counters.here(state) is here for state, here in pairs), "nothing has changed them since"


def test_counters_of_main_memory_are_themselves() -> None:
    state = torch.zeros(())
    counters = HostCounters()
    here = counters.here(state)
    assert here is state
    counters.update([(state, here)])
    assert state._version == 0


@pytest.mark.parametrize("setting", ["lr", "betas"])
def test_settings_on_the_device_keep_updates_there(setting: str) -> None:
    """A fused update on the CPU would copy them without waiting for the copy."""
    optimizer = torch.optim.AdamW([torch.zeros(4)], lr=torch.tensor(1e-3), fused=True)
    assert OptimizerFacts.of(optimizer).off_host_because is None, "in main memory"
    there = torch.tensor(0.1, device="meta")
    optimizer.param_groups[0][setting] = there if setting == "lr" else (0.9, there)
    assert "on the device" in (OptimizerFacts.of(optimizer).off_host_because or "")


def test_deterministic_algorithms_keep_updates_on_the_device() -> None:
    """From when they are asked for, whatever a plan says that was made before."""
    optimizer = torch.optim.AdamW([torch.zeros(4)])
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic" in (OptimizerFacts.of(optimizer).off_host_because or "")
    finally:
        torch.use_deterministic_algorithms(False)
    assert OptimizerFacts.of(optimizer).off_host_because is None


class Knowing:
    """Stands in for a pager that knows all tensors."""

    def known_block(self, tensor: Tensor) -> Any:
        return SimpleNamespace(span=True)


def on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the update of its only parameter can run there."""
    pager: Any = Knowing()
    return bool(HostUpdates(pager)._member(OptimizerFacts.of(optimizer), owned_parameters(optimizer)[0]))


def test_what_memory_alone_does_not_tell_stays_on_the_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.conj().backward(torch.full((4,), 1 + 2j))
    assert parameter.grad is not None and parameter.grad.is_conj() and not on_host(optimizer)
    parameter.grad = parameter.grad.resolve_conj()
    assert on_host(optimizer)


def test_states_that_are_still_to_come_are_made_on_the_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert not on_host(optimizer)
    optimizer.state[parameter]["momentum_buffer"] = None  # type: ignore[assignment]
    assert not on_host(optimizer)
    optimizer.step()
    assert on_host(optimizer)
