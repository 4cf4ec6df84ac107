"""Inductor's code on a GPU, by a script with few options: its host side keeps the budget, and an embedding takes no copy."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .training import MADE_UP

HOST_SIDE = """
import sys
import torch
import teraio
from torch import nn

budget = 224 << 20
layers = [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(6)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters())
options = {"memory_budget": budget, "host_budget": "1GiB", "profile_iterations": 1, "mode": sys.argv[1]}
run = torch.compile(model, backend="teraio", options=options)
for step in range(6):
    run(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert teraio.wait_for_plan(300)
    (status,) = teraio.status()
print(status.phase, status.moved_bytes["device->host"] > 0, torch.cuda.max_memory_reserved() <= budget)
"""
"""Prints what holds in the end. Weights, gradients and states take 200 MiB."""


@pytest.mark.skipif(not MADE_UP, reason="on a GPU, other tests run Inductor's code with its numbers")
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_inductors_host_side_keeps_the_budget(mode: str) -> None:
    """Triton's kernels are compiled, tuned and launched, and do nothing: numbers mean nothing."""
    environment = {**os.environ, "MADE_UP_CUDA_KERNELS": "nothing"}
    found = subprocess.run([sys.executable, "-c", HOST_SIDE, mode], capture_output=True, text=True, env=environment, check=False)
    assert found.stdout.splitlines()[-1:] == ["planned True True"], found.stderr


EMBEDDING = """
import torch
import teraio
from torch import nn

words = nn.Embedding(32_000, 512, device="cuda", dtype=torch.bfloat16)
numbers = torch.randint(0, 320, (4, 512), device="cuda")
run = torch.compile(words, backend="teraio", options={"memory_budget": "1GiB"})
loss = run(numbers).square().sum()
before = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
loss.backward()
taken = torch.cuda.max_memory_allocated() - before
expected = torch.zeros(32_000, 512, device="cuda").index_add_(0, numbers.ravel(), 2 * words(numbers).float().flatten(0, 1))
print(taken / words.weight.nbytes, torch.allclose(words.weight.grad.float(), expected, rtol=0.02, atol=0.02))
"""
"""Prints the bytes that backward takes, in those of the embedding, and whether the gradient is right."""


def test_inductors_gradient_of_an_embedding_has_no_copy_in_32_bits() -> None:
    environment = {**os.environ, "MADE_UP_CUDA_KERNELS": "nothing"}
    found = subprocess.run([sys.executable, "-c", EMBEDDING], capture_output=True, text=True, env=environment, check=False)
    taken, right = found.stdout.split()
    assert float(taken) < 1.5, found.stderr
    assert MADE_UP or right == "True", "numbers mean nothing without Triton's kernels"
