"""Real models and what training scripts do: the same numbers with half of the memory as with all of it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra models")

from .catalogue import MODELS  # noqa: E402
from .loops import LOOPS, Loop  # noqa: E402
from .parity import case_of, check_half, of_libraries  # noqa: E402
from .scripts import SCRIPTS  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("fine_and_quick"),
    *of_libraries,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # of frameworks: they turn into errors inside Dynamo
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
]
TRIALS = {
    **{("model", m.name): Loop(case=case_of(m, planned=True), package=m.package, codegen=m.codegen) for m in MODELS.values()},
    **{("loop", name): loop for name, loop in {**LOOPS, **SCRIPTS}.items()},
}


@pytest.mark.parametrize(("kind", "name"), TRIALS)
def test_half_of_the_memory(kind: str, name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    trial = TRIALS[kind, name]
    pytest.importorskip(trial.package, reason=f"needs {trial.package}", exc_type=ImportError)
    record_property("row", (kind, name))
    found = check_half(trial.case, tmp_path, trial.codegen)
    record_property("facts", {"kind": kind, "model": name, "package": trial.package, **found})
