"""Run the tests for a GPU, each file in a process of its own, and stop at the first error that spoils a process.

python -m tools.gpu_tests [arguments of pytest]

What the other tests rely on comes first. An illegal access or a failed assertion on the GPU is *sticky*: every later call to CUDA
in the process fails with it, and more failures tell nothing. `tests/gpu/conftest.py` then interrupts its process, and no further
file runs. Exit status 0 if all files have passed; 1 if tests have failed; 2 after a sticky error or an interruption.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path("tests/gpu")
ORDER = (
    "test_made_up_driver.py",
    "test_stores.py",
    "test_stream_sequences.py",
    "test_host_memory.py",
    "test_allocator.py",
    "test_training.py",
    "test_asynchronous.py",
    "test_budget.py",
    "test_tiles.py",
    "test_larger.py",
    "test_whole_trainings.py",
    "test_parity.py",
)
"""Memory, copies and streams first; then what needs all of it. The longest comes last."""
INTERRUPTED, NOTHING_COLLECTED = 2, 5


def files(folder: Path) -> list[Path]:
    """Return the files of tests in `folder` in the order of ORDER, and then those that it does not name."""
    found = sorted(folder.glob("test_*.py"))
    return sorted(found, key=lambda path: ORDER.index(path.name) if path.name in ORDER else len(ORDER))


def main(arguments: Sequence[str], folder: Path = FOLDER) -> int:
    """Run all files. Return the exit status."""
    failed: list[str] = []
    ran = 0
    for path in files(folder):
        print(f"-- {path.name}", flush=True)
        status = subprocess.run([sys.executable, "-m", "pytest", str(path), *arguments], check=False).returncode
        ran += status != NOTHING_COLLECTED
        if status == INTERRUPTED or status < 0:
            print(
                f"{path.name} was {_how(status)}: no further file is run, because their failures would tell nothing", flush=True
            )
            return INTERRUPTED
        if status not in (0, NOTHING_COLLECTED):
            failed.append(path.name)
    if failed or not ran:
        print(f"failed: {', '.join(failed)}" if failed else "no tests ran", flush=True)
        return 1
    return 0


def _how(status: int) -> str:
    return "interrupted" if status == INTERRUPTED else f"ended by signal {-status}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
