"""Real models and what training scripts do: the same numbers with half of the memory as with all of it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra models")

from .catalogue import MODELS  # noqa: E402
from .loops import LOOPS  # noqa: E402
from .parity import check_half, of_libraries  # noqa: E402
from .scripts import SCRIPTS  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fine_and_quick"),
    *of_libraries,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of frameworks: they turn into errors inside Dynamo
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
]
TRIALS = {
    **{("model", name): model for name, model in MODELS.items()},
    **{("loop", name): loop for name, loop in {**LOOPS, **SCRIPTS}.items()},
}
WITH_INDUCTOR = (
    ("model", "Llama"),
    ("model", "Llama with LoRA"),
    ("model", "Stable Diffusion 3"),
    ("model", "Swin Transformer V2"),
    ("model", "UNet of Stable Diffusion"),
    ("loop", "fused AdamW"),
    ("loop", "`GradScaler`, autocast to fp16"),
    ("loop", "LBFGS"),
    ("loop", "Lightning's automatic loop"),
    ("loop", "mixup and moving average, as in timm's script"),
)
"""Those of `TRIALS` that are also trained with Inductor's code, which takes minutes to compile."""
ROWS = [(*trial, "eager") for trial in TRIALS] + [(*trial, "inductor") for trial in WITH_INDUCTOR]


@pytest.mark.parametrize(("kind", "name", "codegen"), ROWS)
def test_half_of_the_memory(
    kind: str, name: str, codegen: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    trial = TRIALS[kind, name]
    pytest.importorskip(trial.package, reason=f"needs {trial.package}", exc_type=ImportError)
    record_property("row", (kind, name, codegen))
    found = check_half(trial.case, tmp_path, codegen)
    record_property("facts", {"kind": kind, "model": name, "codegen": codegen, "package": trial.package, **found})
