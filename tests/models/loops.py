"""What training scripts do: loops and settings, most of them over a Llama, by name in `LOOPS`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..teraio.parity.harness import Case, Run, plain_step
from . import others, text
from .others import own_loss
from .parity import Loop, adamw
from .text import Batch


def autocast_loss(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The loss in mixed precision."""
    with torch.autocast("cpu", dtype=dtype):
        return own_loss(model, batch)


def record(run: Run, loss: Tensor) -> None:
    run.record_loss(loss)
    run.record_gradients()


def step_by_closure(run: Run, batch: Batch, index: int) -> None:
    """The optimizer computes the loss, as in Lightning's automatic loop."""
    run.optimizer.step(partial(closure, run, batch))


def closure(run: Run, batch: Batch) -> Tensor:
    run.optimizer.zero_grad()
    loss = run.loss(batch)
    loss.backward()
    record(run, loss)
    return loss


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


def eight_bits(module: nn.Module) -> Optimizer:
    """AdamW with states of 8 bits."""
    import torchao.optim

    return torchao.optim.AdamW8bit([p for p in module.parameters() if p.requires_grad], lr=1e-3)


def fused(module: nn.Module) -> Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def lbfgs(module: nn.Module) -> Optimizer:
    """Each step computes the loss up to three times."""
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=2, max_eval=3, history_size=2)


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
    "`DataCollatorWithFlattening`, one plan for all lengths": llama(
        make_batches=text.flattened, steps=14, planned=True, compile_options={"dynamic": True}
    ),
    "packed by `cu_seqlens`, one plan for all lengths": llama(
        make=OfDocuments, make_batches=text.packed, steps=14, planned=True, compile_options={"dynamic": True}
    ),
    "fused AdamW": llama(make_optimizer=fused, **PLANNED),
    "AdamW with states of 8 bits": llama(make_optimizer=eight_bits, package="torchao", **PLANNED),
    "LBFGS": llama(step_by_closure, make_optimizer=lbfgs),
    "`GradScaler`, autocast to fp16": llama(scale, compute_loss=partial(autocast_loss, dtype=torch.float16), steps=6),
    "`GradScaler`, autocast to bf16": llama(scale, compute_loss=autocast_loss, **PLANNED),
    "mixup and moving average, as in timm's script": llama(
        mix,
        partial(others.timm_model, "vit_tiny_patch16_224", **others.VIT),
        make_batches=others.pictures,
        package="timm",
        **PLANNED,
    ),
}
