"""What training scripts do: loops and settings, most of them over a Llama, by name in `LOOPS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from ..teraio.parity.harness import Case, Run, plain_step
from . import others, text
from .others import own_loss
from .parity import Loop, adamw
from .text import Batch


def autocast_loss(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The loss in mixed precision."""
    with torch.autocast("cpu", dtype=dtype):
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
    run.optimizer.step(partial(closure, run, batch))


def closure(run: Run, batch: Batch) -> Tensor:
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    record(run, loss)
    return loss


def of_changing_length(steps: int) -> list[Batch]:
    return [text.sentences(1, length=(64, 48, 96)[step % 3])[0] for step in range(steps)]


class OfDocuments(nn.Module):
    """A Llama whose mask keeps the texts apart that are packed into one row."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = text.llama(max_position_embeddings=2048)

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1])
        document = torch.bucketize(places, cu_seqlens[1:], right=True)
        mask = (document[:, None] == document) & (places[:, None] >= places)
        positions = places - cu_seqlens[document]
        return self.llama(input_ids=input_ids, labels=labels, position_ids=positions[None], attention_mask=mask[None, None])


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


def scale(run: Run, batch: Batch, index: int) -> None:
    """Scale the loss so that gradients in half precision do not vanish; a step whose gradients overflow is left out."""
    scaler = run.kept.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=2))
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    scaler.scale(loss).backward()
    scaler.unscale_(run.optimizer)
    norm = nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
    run.record_loss(loss)
    if norm.isfinite():  # no NaN equals another
        run.record("norm", norm)
        run.record_gradients()
    scaler.step(run.optimizer)
    scaler.update()
    run.record("scale", torch.tensor(scaler.get_scale()))


def from_workers(start: str) -> Callable[[Run, Batch, int], None]:
    """Steps on batches of a data loader. Its worker processes start every two steps, by that method, while blocks are away."""

    def step(run: Run, batch: Batch, index: int) -> None:
        if index % 2 == 0:
            rows = text.sentences(2)
            run.kept["rows"] = iter(DataLoader(rows, batch_size=None, num_workers=2, multiprocessing_context=start))
        plain_step(run, next(run.kept["rows"]), index)

    return step


def compiled_step(run: Run, batch: Batch, index: int) -> None:
    """A step with a closure, compiled; without other operators, which would round in another way."""
    step = run.kept.setdefault("step", torch.compile(run.optimizer.step, backend="eager"))
    step(partial(closure, run, batch))


def eight_bits(module: nn.Module) -> Optimizer:
    """AdamW with states of 8 bits."""
    import torchao.optim

    return torchao.optim.AdamW8bit([p for p in module.parameters() if p.requires_grad], lr=1e-3)


def fused(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def lbfgs(module: nn.Module) -> Optimizer:
    """Each step computes the loss up to three times."""
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=2, max_eval=3, history_size=2)


def two_adapters() -> nn.Module:
    """A Llama with the LoRA adapters `default` and `other`."""
    model = others.llama_with_adapters()
    model.add_adapter("other", model.peft_config["default"])
    return model


def of_all_adapters(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for name, p in module.named_parameters() if "lora_" in name], lr=1e-3)


def switch_adapters(run: Run, batch: Batch, index: int) -> None:
    """Train the two adapters by turns, and evaluate without any."""
    run.module.set_adapter(("default", "other")[index % 2])
    plain_step(run, batch, index)
    with torch.no_grad(), run.module.disable_adapter():
        run.record("loss without adapters", run.loss(batch))


def mix(run: Run, batch: Batch, index: int) -> None:
    """As timm's script: mixed pictures and classes, clipped gradients, and a moving average of the model."""
    import timm.data
    import timm.utils

    mixup = run.kept.setdefault("mixup", timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10))
    mean = run.kept.setdefault("mean", timm.utils.ModelEmaV3(run.module, decay=0.9))
    np.random.seed(index)
    pictures, shares = mixup(batch["pixel_values"].clone(), batch["labels"])
    run.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(run.model(pictures), shares)
    loss.backward()
    timm.utils.dispatch_clip_grad(run.module.parameters(), 1.0)
    record(run, loss)
    run.optimizer.step()
    mean.update(run.module)
    with torch.no_grad():
        run.record("loss of the average", others.classes_loss(mean.module, batch))


def llama(
    step: Callable[[Run, Batch, int], None] = plain_step,
    make: Callable[[], nn.Module] = text.llama,
    package: str = "transformers",
    **settings: Any,
) -> Loop:
    """A Llama that trains for four steps on padded sentences. settings: other ones of the case."""
    usual = {"make_batches": text.padded(), "make_optimizer": adamw, "compute_loss": own_loss, "steps": 4}
    return Loop(case=Case(make_model=make, step=step, **usual | settings), package=package)


PLANNED = {"steps": None, "planned": True}
LOOPS = {
    "autocast to bf16": llama(compute_loss=autocast_loss, **PLANNED),
    "weights in bf16": llama(make=in_bf16, make_batches=lambda n: text.sentences(n, rows=32)),
    "tied embeddings": llama(make=lambda: text.llama(tie_word_embeddings=True)),
    "evaluation in between": llama(evaluate),
    "`generate` in between": llama(generate),
    "accumulation of gradients": llama(accumulate, make_batches=lambda n: text.sentences(n, rows=32)),
    "clipping, with a scheduler": llama(clip, make_scheduler=warm_up),
    "moving average of the parameters": llama(average),
    "freezing and unfreezing": llama(freeze_and_unfreeze, steps=6),
    "gradient checkpointing": llama(make=checkpointed(reentrant=False)),
    "gradient checkpointing, reentrant": llama(make=checkpointed(reentrant=True)),
    "a step with a closure": llama(step_by_closure),
    "`torch.compile(optimizer.step)` with a closure": llama(compiled_step),
    "sentences of changing length": llama(make_batches=of_changing_length, steps=6),
    **{
        f"{name}, one plan for all lengths": llama(
            make_batches=batches, steps=14, planned=True, compile_options={"dynamic": True}
        )
        for name, batches in (
            ("`DataCollatorWithPadding`, grouped by length", text.grouped),
            ("`DataCollatorWithFlattening`", text.flattened),
        )
    },
    "packed by `cu_seqlens`, one plan for all lengths": llama(
        make=OfDocuments, make_batches=text.packed, steps=14, planned=True, compile_options={"dynamic": True}
    ),
    "fused AdamW": llama(make_optimizer=fused, **PLANNED),
    "AdamW with states of 8 bits": llama(make_optimizer=eight_bits, package="torchao", **PLANNED),
    "LBFGS": llama(step_by_closure, make_optimizer=lbfgs),
    "`GradScaler`, autocast to fp16": llama(scale, compute_loss=partial(autocast_loss, dtype=torch.float16), steps=6),
    "`GradScaler`, autocast to bf16": llama(scale, compute_loss=autocast_loss, **PLANNED),
    "a data loader with forked workers": llama(from_workers("fork")),
    "a data loader with spawned workers": llama(from_workers("spawn")),
    "two LoRA adapters by turns": llama(switch_adapters, two_adapters, make_optimizer=of_all_adapters, steps=6, package="peft"),
    "mixup and moving average, as in timm's script": llama(
        mix,
        partial(others.timm_model, "vit_tiny_patch16_224", **others.VIT),
        make_batches=others.pictures,
        package="timm",
        **PLANNED,
    ),
    "sparse embedding": llama(
        make=Recommender,
        make_batches=lambda n: text.sentences(n, rows=128),
        make_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        compute_loss=recommender_loss,
    ),
}
