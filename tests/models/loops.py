"""What training scripts do with a model of transformers: the loops and settings of `test_loops.py`, as cases by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..teraio.parity.harness import Case, Run, plain_step
from . import text
from .others import own_loss
from .parity import adamw
from .text import Batch


def autocast_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss in mixed precision."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return own_loss(model, batch)


def in_bf16() -> nn.Module:
    return text.llama().to(torch.bfloat16)


def checkpointed(*, reentrant: bool) -> Callable[[], nn.Module]:
    """A Llama that computes its layers again in the backward pass."""

    def make() -> nn.Module:
        model = text.llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return make


def record(run: Run, loss: Tensor) -> None:
    run.record_loss(loss)
    run.record_gradients()


def accumulate(run: Run, batch: Batch, index: int) -> None:
    """Two passes, each over half of the rows, before the update."""
    run.optimizer.zero_grad()
    for half in range(2):
        loss = run.loss({name: value.chunk(2)[half] for name, value in batch.items()}) / 2
        loss.backward()
        run.record_loss(loss)
    run.record_gradients()
    run.optimizer.step()


def clip(run: Run, batch: Batch, index: int) -> None:
    """Bring the norm of the gradients down before the update."""
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    run.record("norm", nn.utils.clip_grad_norm_(run.module.parameters(), 0.1))
    record(run, loss)
    run.optimizer.step()


def warm_up(optimizer: Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return transformers.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)


def evaluate(run: Run, batch: Batch, index: int) -> None:
    """Evaluate after each step."""
    plain_step(run, batch, index)
    run.module.eval()
    with torch.no_grad():
        run.record("loss in evaluation", run.loss(batch))
    run.module.train()


def generate(run: Run, batch: Batch, index: int) -> None:
    """Continue a sentence after each step, with the model as the user made it."""
    plain_step(run, batch, index)
    run.module.eval()
    words = run.module.generate(batch["input_ids"][:2, :8], max_new_tokens=4, do_sample=False, use_cache=True)
    run.record("words", words)
    run.module.train()


def average(run: Run, batch: Batch, index: int) -> None:
    """Keep a moving average of the parameters, and evaluate it at the end."""
    mean = run.kept.setdefault("mean", AveragedModel(run.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    plain_step(run, batch, index)
    mean.update_parameters(run.module)
    with torch.no_grad():
        run.record("loss of the average", own_loss(mean, batch))


def freeze_and_unfreeze(run: Run, batch: Batch, index: int) -> None:
    """The first layer trains in the first two steps and from the fifth on."""
    run.module.get_submodule("model.layers.0").requires_grad_(index < 2 or index >= 4)
    plain_step(run, batch, index)


def step_by_closure(run: Run, batch: Batch, index: int) -> None:
    """The optimizer computes the loss, as in Lightning's automatic loop."""

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(batch)
        loss.backward()
        record(run, loss)
        return loss

    run.optimizer.step(closure)


def of_changing_length(steps: int) -> list[Batch]:
    return [text.sentences(1, length=(64, 48, 96)[step % 3])[0] for step in range(steps)]


class Recommender(nn.Module):
    """A table of which each batch touches a few rows, and a small model over it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, text.WIDTH, sparse=True)
        self.up, self.down = nn.Linear(text.WIDTH, 4 * text.INNER), nn.Linear(4 * text.INNER, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.table(words).mean(1))))


def recommender_loss(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"][:, 0] % 10)


def llama_case(
    step: Callable[[Run, Batch, int], None] = plain_step, make: Callable[[], nn.Module] = text.llama, **settings: object
) -> Case:
    """A Llama that trains for four steps on padded sentences."""
    usual = {"make_batches": text.padded(), "make_optimizer": adamw, "compute_loss": own_loss, "steps": 4}
    return Case(make_model=make, step=step, **usual | settings)


LOOPS = {
    "autocast to bf16": llama_case(compute_loss=autocast_loss, steps=None, planned=True),
    "weights in bf16": llama_case(make=in_bf16, make_batches=lambda n: text.sentences(n, rows=32)),
    "tied embeddings": llama_case(make=lambda: text.llama(tie_word_embeddings=True)),
    "evaluation in between": llama_case(evaluate),
    "`generate` in between": llama_case(generate),
    "accumulation of gradients": llama_case(accumulate, make_batches=lambda n: text.sentences(n, rows=32)),
    "clipping, with a scheduler": llama_case(clip, make_scheduler=warm_up),
    "moving average of the parameters": llama_case(average),
    "freezing and unfreezing": llama_case(freeze_and_unfreeze, steps=6),
    "gradient checkpointing": llama_case(make=checkpointed(reentrant=False)),
    "gradient checkpointing, reentrant": llama_case(make=checkpointed(reentrant=True)),
    "a step with a closure": llama_case(step_by_closure),
    "sentences of changing length": llama_case(make_batches=of_changing_length, steps=6),
    "sparse embedding": Case(
        make_model=Recommender,
        make_batches=lambda n: text.sentences(n, rows=128),
        make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        compute_loss=recommender_loss,
        step=plain_step,
        steps=4,
    ),
}
