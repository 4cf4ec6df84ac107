"""Train a policy by REINFORCE, and park it while answers are sampled: one device for the sampler and the training in turn.

    python -m examples.reinforce

In each round a copy of the policy samples groups of rows, and each row is rewarded beside the others of its group. While the
copy samples, which stands for an inference engine, `teraio.park()` has let everything of the training leave the device:
parameters, gradients and optimizer states. The next step brings back what it needs, and goes on by the same plan. The reward is
a small one that can be learnt soon: how many bytes are one more than the byte before.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

import teraio
from examples.gpt import GPT, GPTConfig

WORDS = 16


class Policy(nn.Module):
    """Rows of (batch, time) and the advantage of each to the loss of REINFORCE."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)

    def forward(self, rows: Tensor, advantages: Tensor) -> Tensor:
        surprise = functional.cross_entropy(self.gpt.logits(rows[:, :-1]).mT, rows[:, 1:], reduction="none")
        return (surprise.mean(1) * advantages).mean()


@torch.no_grad()
def sample(policy: GPT, groups: int, size: int, generator: torch.Generator) -> Tensor:
    """Return rows of (groups x size, context); those of a group begin alike."""
    rows = torch.randint(WORDS, (groups, 1), generator=generator).repeat_interleave(size, 0)
    for _ in range(policy.config.context - 1):
        likely = policy.logits(rows)[:, -1].softmax(-1)
        rows = torch.cat((rows, torch.multinomial(likely, 1, generator=generator)), 1)
    return rows


def reward(rows: Tensor) -> Tensor:
    """Return for each row the share of its bytes that are one more than the byte before."""
    return ((rows[:, :-1] + 1) % WORDS == rows[:, 1:]).float().mean(1)


def main(
    memory_budget: Annotated[str, typer.Option(help="Of the device, which is main memory here.")] = "112MiB",
    storage: Annotated[Path, typer.Option(help="Folder for spill files, on a fast drive.")] = Path("/tmp"),
    layers: Annotated[int, typer.Option(help="Of the policy; the budget is for 4.", min=1)] = 4,
    context: Annotated[int, typer.Option(help="Length of a row.", min=2)] = 16,
    rounds: Annotated[int, typer.Option(help="Of sampling and training.", min=1)] = 20,
    updates: Annotated[int, typer.Option(help="In each round, each by other groups.", min=1)] = 2,
    codegen: Annotated[str, typer.Option(help="inductor, or eager to compile nothing.")] = "inductor",
) -> None:
    """Train a policy of 49 MiB, which takes 196 MiB with gradients and AdamW's states."""
    generator = torch.manual_seed(0)
    config = GPTConfig(layers=layers, context=context, vocabulary=WORDS)
    policy, sampler = Policy(config), GPT(config).eval()
    teraio.compile(policy, memory_budget=memory_budget, storage=storage, codegen=codegen)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    for number in range(1, rounds + 1):
        sampler.load_state_dict(policy.gpt.state_dict())
        with teraio.park() as parked:
            rows = sample(sampler, 4 * updates, 8, generator)
        rewards = reward(rows).view(4 * updates, 8)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
        for part in torch.arange(len(rows)).chunk(updates):
            policy(rows[part], advantages[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
        left = parked.left_bytes >> 20
        print(f"{number:4}  reward {rewards.mean():.3f}  {left} MiB left the device for the sampler  {teraio.status()[0].phase}")
    (status,) = teraio.status()
    print(f"at most {status.device_peak_bytes >> 20} MiB on the device")


if __name__ == "__main__":
    typer.run(main)
