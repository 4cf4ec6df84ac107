"""Scripts whose loop is that of a framework, by name in `SCRIPTS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import teraio

from ..teraio.parity.harness import Result
from ..training import PLAN_SECONDS, named_values
from . import text
from .others import own_loss
from .parity import Loop, Script

Options = Mapping[str, Any]


@dataclass(slots=True)
class Watch:
    """What a script has computed so far. progress: teraio's status after each step."""

    losses: list[Tensor] = field(default_factory=list)
    progress: list[tuple[teraio.Status, ...]] = field(default_factory=list)

    def after_step(self, loss: Tensor | float) -> None:
        """Wait for the plan that is being made, if any, so that all runs follow one at the same time."""
        self.losses.append(torch.as_tensor(loss).detach().clone())
        teraio.wait_for_plan(PLAN_SECONDS)
        self.progress.append(teraio.status())

    def result(self, module: nn.Module) -> Result:
        """End teraio's part."""
        teraio.reset()
        values = {name: value.detach().clone() for name, value in named_values(module)}
        return Result(tuple(self.losses), (), (), values, tuple(self.progress))


def lightning_fit(options: Options, folder: Path) -> Result:
    """Lightning's automatic optimization, in mixed precision, with clipping, checkpoints and a schedule."""
    import lightning
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    watch = Watch()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = text.llama()

        def training_step(self, batch: text.Batch, index: int) -> Tensor:
            loss = own_loss(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]

        def on_train_batch_end(self, outputs: Mapping[str, Tensor], batch: text.Batch, index: int) -> None:
            watch.after_step(outputs["loss"])

    lightning.seed_everything(1, verbose=False)
    module = Module()
    teraio.compile(module.model, **options)
    trainer = lightning.Trainer(
        max_steps=8,
        accelerator="cpu",
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(every_n_train_steps=3), LearningRateMonitor()],
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(text.sentences(8), batch_size=None))
    return watch.result(module)


OF_TRL: dict[str, Any] = {"logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True}
"""Arguments of its trainers: on the CPU, and quiet."""


def sft(strategy: str | None) -> Callable[[Options, Path], Result]:
    """TRL's supervised fine-tuning on texts of different length, packed by that strategy.

    None: each batch is padded to its longest text, those of like length come together, and one graph has symbolic sizes.
    """

    def run(options: Options, folder: Path) -> Result:
        from datasets import Dataset
        from transformers import set_seed
        from trl import SFTConfig, SFTTrainer

        set_seed(1)
        model = text.llama()
        teraio.compile(model, dynamic=None if strategy else True, **options)
        draw = np.random.default_rng(1)
        rows = [draw.integers(3, text.WORDS, size=draw.integers(8, 64)).tolist() for _ in range(400)]
        arguments = SFTConfig(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=16,
            max_length=64,
            max_steps=8 if strategy else 14,
            **({"packing": True, "packing_strategy": strategy} if strategy else {"train_sampling_strategy": "group_by_length"}),
            **OF_TRL,
        )
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": rows}), processing_class=words()
        )
        return trained_by(trainer, model)

    return run


def grpo(options: Options, folder: Path) -> Result:
    """TRL's group relative policy optimization: texts are generated for each prompt, rewarded, and learned."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import GRPOConfig, GRPOTrainer

    def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(word % 2 for word in each) / (len(each) + 1) for each in completion_ids]

    set_seed(1)
    model = text.llama()
    teraio.compile(model, dynamic=True, **options)
    draw = np.random.default_rng(1)
    prompts = [" ".join(f"w{word}" for word in draw.integers(3, text.WORDS, size=draw.integers(4, 24))) for _ in range(64)]
    arguments = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=24,
        max_steps=17,
        **OF_TRL,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=words(),
    )
    return trained_by(trainer, model)


def trained_by(trainer: Any, model: nn.Module) -> Result:
    """Let a trainer of TRL train, watched after each step."""
    from transformers import TrainerCallback

    watch = Watch()

    class AfterStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.after_step(0.0)

    trainer.add_callback(AfterStep())
    trainer.train()
    watch.losses = [torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return watch.result(model)


def words() -> Any:
    """A tokenizer for which each number below `text.WORDS` is a word: w3, w4 and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {"<end>": 0, **{f"w{number}": number for number in range(1, text.WORDS)}}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


SCRIPTS = {
    "Lightning's automatic loop": Loop(case=Script(run=lightning_fit, planned=True), package="lightning"),
    "`SFTTrainer`, padded and grouped by length": Loop(case=Script(run=sft(None), planned=True), package="trl"),
    "`GRPOTrainer`": Loop(case=Script(run=grpo, planned=True), package="trl"),
    "`SFTTrainer`, packed": Loop(case=Script(run=sft("bfd")), package="trl"),
    "`SFTTrainer`, packed and cut (`wrapped`)": Loop(case=Script(run=sft("wrapped"), planned=True), package="trl"),
}
