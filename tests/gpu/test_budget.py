"""Cases that users of a GPU meet: budgets that are too small, memory of their own, blocks on drives, and `reset`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import teraio
from runtime.paging import Block, State

from ..training import compiled, pagers
from .training import GPU_SCALE, STEPS, Case, Perceptron, Scale, Transformer, check_equal, train, unlimited

DEVICE = torch.device("cuda")
CASE = Case(name="perceptron", model=Perceptron)


def test_a_budget_that_no_schedule_can_satisfy_is_refused() -> None:
    with pytest.raises(teraio.BudgetError, match="needs .* at once; give a memory_budget of at least"):
        train(CASE, {"memory_budget": 12 * GPU_SCALE.rows * GPU_SCALE.width, "host_budget": "256MiB"}, device=DEVICE)
    assert teraio.status() == (), "no runtime is left"


def test_what_is_measured_at_the_start_keeps_the_budget() -> None:
    budget = 160 << 20
    module = nn.Linear(2048, 2048, bias=False).to(DEVICE)
    torch.cuda.reset_peak_memory_stats()
    compiled(module, {"memory_budget": budget, "host_budget": "512MiB"})(torch.ones(8, 2048, device=DEVICE)).sum().backward()
    assert torch.cuda.max_memory_reserved() <= budget


def test_the_users_own_memory_counts() -> None:
    """A tensor that the user makes during training counts within the budget: more blocks must leave."""
    wanted = unlimited(CASE)
    peak = wanted.peak_bytes
    held: list[torch.Tensor] = []

    def between(step: int, module: nn.Module) -> None:
        if step == STEPS - 6:
            held.append(torch.zeros(peak // 8, dtype=torch.uint8, device=DEVICE))

    budget = int(0.75 * peak)
    found = train(CASE, {"memory_budget": budget, "host_budget": 2 * peak}, device=DEVICE, between=between)
    check_equal(found, wanted)
    assert found.allocated_bytes is not None and found.allocated_bytes <= budget
    assert found.progress[-1].device_peak_bytes <= budget


@contextmanager
def away(tensor: torch.Tensor, tier: str) -> Iterator[Block]:
    """Offload a tensor's block to a tier, as a plan does at the end of a region."""
    (pager,) = pagers()
    block = pager.known_block(tensor)
    assert block is not None and block.span is not None
    with pager.device.region():
        pager.enter_region()
        pager.offload(block, tier)  # type: ignore[arg-type]
        pager.leave_region()
    assert block.state is State.OFFLOADED and block.tier == tier
    yield block


@pytest.mark.parametrize("tier", ["host", "storage"])
def test_what_waits_in_host_memory_can_be_used_and_on_a_drive_it_says_how_it_can(tmp_path: Path, tier: str) -> None:
    looked = []

    def between(step: int, module: nn.Module) -> None:
        if step != STEPS - 2:
            return
        weight = module.layers[0].up.weight
        with teraio.on_device([weight]):
            before = weight.detach().cpu()
        with away(weight, tier) as block:
            if tier == "host":
                assert torch.equal(weight.detach().cpu(), before), "through its copy in host memory"
                weight.detach().neg_().neg_()
                assert block.state is State.OFFLOADED
            else:
                with pytest.raises(
                    RuntimeError, match=r"up\.weight .* is not in memory: teraio has moved it to storage.*on_device"
                ):
                    weight.detach().sum()
                with teraio.on_device([weight]):
                    assert torch.equal(weight.detach().cpu(), before)
                    weight.detach().mul_(1)
        looked.append(before)

    wanted = unlimited(CASE)
    peak = wanted.peak_bytes
    tiers = {"host_budget": 2 * peak} if tier == "host" else {"storage": tmp_path}
    found = train(CASE, {"memory_budget": int(0.75 * peak), **tiers}, device=DEVICE, between=between)
    assert looked
    check_equal(found, wanted)


def test_reset_brings_back_more_than_the_budget() -> None:
    """The budget ends with its runtime: all blocks come back, even if they exceed the budget."""
    scale = Scale(rows=512, width=1024, layers=12)
    module = Transformer(scale).to(DEVICE)
    wanted = [p.detach().cpu() for p in module.parameters()]
    size = sum(p.untyped_storage().nbytes() for p in module.parameters())
    budget = int(1.4 * size)
    model = compiled(module, {"memory_budget": budget, "host_budget": 4 * size})
    indices = torch.arange(scale.rows, device=DEVICE)
    for _ in range(2):  # the second time, new gradients are added to those in host memory
        model(indices).square().mean().backward()
    assert sum(teraio.status()[0].moved_bytes.values()) > 0
    teraio.reset()
    assert torch.cuda.memory_allocated(DEVICE) >= 2 * size > budget, "parameters and gradients"
    assert all(torch.equal(p.detach().cpu(), w) for p, w in zip(module.parameters(), wanted, strict=True))
    found = [p.grad.cpu() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    for _ in range(2):
        module(indices).square().mean().backward()
    torch.testing.assert_close(found, [p.grad.cpu() for p in module.parameters() if p.grad is not None], rtol=1e-3, atol=1e-5)
