"""What a user does first, run against an installed teraio from another folder (`make check` does so).

Trains a small model by the backend's name, never importing teraio, under a budget that does not fit it;
compares the losses with eager's; checks that bytes moved, the files are gone and the command line answers.
With the argument "no-compiler", where there is none: stages are not compiled either, and every byte that comes back is checked.
Exits with a message and a status other than 0 if one of these does not hold.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

WIDTH, LAYERS, ROWS, STEPS = 512, 6, 2048, 5
BUDGET = "48MiB"  # one backward stage alone needs 33 MiB; all that the forward saves takes about 70 MiB


def losses(compile_model: Callable[[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]]) -> list[float]:
    """The losses of STEPS steps of a small network that starts from a fixed seed."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    run = compile_model(model)
    seen = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(run(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def require(condition: bool, message: str) -> None:
    """Ends the program with `message` unless `condition` holds."""
    if not condition:
        sys.exit(f"smoke test failed: {message}")


def check_shipped_libraries() -> None:
    """Checks that every C++ function came with the wheel: there is no compiler, and none was compiled before."""
    from runtime.system import missing_gpu

    require(not any(map(shutil.which, ("cc", "c++", "gcc", "g++", "clang"))), f"there is a compiler on {os.environ['PATH']}")
    with missing_gpu():  # what no training needs
        pass
    compiled = list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))
    require(not compiled, f"compiled: {compiled}")


def main(no_compiler: bool) -> None:
    """Runs every check."""
    expected = losses(lambda model: model)
    with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
        options = {"memory_budget": BUDGET, "storage": folder, "profile_iterations": 2}
        if no_compiler:
            options |= {"codegen": "eager", "debug": True}
        found = losses(lambda model: torch.compile(model, backend="teraio", options=options))
        teraio = sys.modules["teraio"]  # the backend's name brought it in
        status = teraio.status()[0]
        teraio.reset()
        left = list(Path(folder).iterdir())
    difference = max(abs(a - b) / abs(a) for a, b in zip(expected, found, strict=True))
    require(difference < 1e-4, f"losses {found} differ from eager's {expected}")
    require(status.device_peak_bytes <= status.device_budget_bytes, f"over the budget: {status}")
    require(status.moved_bytes["device->storage"] > 0, f"nothing moved: {status}")
    require(not left, f"files left behind: {left}")
    require("site-packages" in str(teraio.__file__), f"tested {teraio.__file__}, not the installed package")
    if no_compiler:
        check_shipped_libraries()
    command = Path(sys.executable).with_name("teraio")
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=True).stdout
    require("teraio" in shown, f"`teraio --help` printed {shown!r}")
    moved = status.moved_bytes["device->storage"] / 2**20
    version = importlib.metadata.version("teraio")
    print(f"teraio {version}: eager's losses within {difference:.1e}, {moved:.0f} MiB moved, under {BUDGET}")


if __name__ == "__main__":
    main(sys.argv[1:] == ["no-compiler"])
