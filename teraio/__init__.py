"""teraio: train models that do not fit into memory, with `teraio.compile(model, memory_budget=...)` and an unchanged loop.

Only the names that this module exports are public. `planner` and `runtime` are parts of teraio.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if sys.version_info < (3, 11):  # noqa: UP036 (found by a path: pip would have said so)
    raise ImportError(f"teraio works with Python 3.11 and later, and this is Python {sys.version.split()[0]}")

if TYPE_CHECKING:
    from typing import Literal, Unpack

    import torch

    import planner
    from teraio.larger import UnderBudget
    from teraio.registry import Registry

for _part in ("planner", "runtime"):
    _spec = find_spec(_part)  # does not run the module: it may be another one of the same name
    _found = None if _spec is None else _spec.origin or list(_spec.submodule_search_locations or ())
    _wanted = Path(__file__).resolve().parents[1] / _part / "__init__.py"
    if not isinstance(_found, str) or Path(_found).resolve() != _wanted:
        raise ImportError(
            f"teraio needs its own package {_part!r}, but found {_found or 'nothing'}; "
            f"rename that file or folder, or start your script from another directory"
        )

from planner.errors import (  # noqa: E402
    BudgetError,
    CheckpointError,
    ChecksumError,
    OptionsError,
    PlanError,
    RankError,
    StorageError,
    StorageFullError,
    StorageIOError,
    TeraioError,
    TraceError,
    UnsupportedError,
)
from teraio.given_options import GivenOptions  # noqa: E402
from teraio.version import __version__  # noqa: E402
from teraio.watching import IterationStats, Parked, Status  # noqa: E402

_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ChecksumError",
    "IterationStats",
    "OptionsError",
    "Parked",
    "PlanError",
    "RankError",
    "Status",
    "StorageError",
    "StorageFullError",
    "StorageIOError",
    "TeraioError",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "capture",
    "compile",
    "manage_optimizer",
    "on_device",
    "on_iteration",
    "park",
    "reset",
    "status",
    "step_done",
    "under_budget",
    "wait_for_plan",
]


def _registry() -> Registry:
    from teraio.registry import REGISTRY  # when it is needed: the command line must start without torch

    return REGISTRY


def compile(
    model: _Compiled, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Unpack[GivenOptions]
) -> _Compiled:
    """Compile a model in place, so that it trains within a memory budget, and return it.

    The model keeps its class, its attributes and the names of its parameters, which trainers and checkpoints rely on. For a
    function that is no `torch.nn.Module`, returns the compiled function; the given one stays as it is.

    dynamic, fullgraph: as for `torch.compile`. options: see `docs/options.md`; those that are not given here come from
    environment variables. Compiles nothing yet: the first call does, which may raise BudgetError and StorageFullError. Raises
    OptionsError.
    """
    from teraio.backend import compile_in_place
    from teraio.options import parse_options

    checked = parse_options(options)  # here, so that an error shows the line of the mistake
    return compile_in_place(model, checked, dynamic=dynamic, fullgraph=fullgraph)


def under_budget(
    *, device: torch.device | str | None = None, **options: Unpack[GivenOptions]
) -> AbstractContextManager[UnderBudget]:
    """Make, load or look at a model that fits nowhere: operators within the `with` block keep the budgets of the options.

    What an operator needs comes to the device first, other tensors leave for it, and large results leave in turn. Parameters that
    are loaded from safetensors files stay in these files until they are needed, and for as long as nobody changes them. Compile
    the model with the same options afterwards: `teraio.compile(model, **options)`.

    device: of the tensors; default: PyTorch's default device. options: as for `compile`; `memory_budget` and a lower tier.
    Operators of other threads, and what NumPy does, are not seen. A compiled model runs uncompiled within the block.
    Raises OptionsError without a lower tier; within the block, BudgetError if one operator alone is too large, StorageError and
    StorageFullError.
    """
    registry = _registry()  # first: it looks for the names of PyTorch that `larger` imports
    from teraio import larger
    from teraio.options import parse_options

    return larger.under_budget(registry, parse_options(options), device)


def capture(
    model_or_training: torch.nn.Module | Callable[[], Callable[[], object]],
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    hardware: str | PathLike[str] = "h100",
    name: str | None = None,
    subgroup_bytes: int | None = None,
    tokens: int | None = None,
    samples: int | None = None,
    lengths: tuple[int, int] | None = None,
    device_bytes: int | None = None,
) -> planner.Trace:
    """Return the trace of one training step as it would run on `hardware`, without its memory. Computes nothing.

    The trace has the stages, blocks and recompute groups that a real run would have. Times are estimated from the work of each
    kernel and the rates of the hardware, see `docs/capture.md`.

    model_or_training: a model, which may be on the device "meta"; or a function that makes the model, compiles it with
    `backend="teraio"`, makes the optimizer and the inputs, and returns a function that takes one step. Both functions run under
    fake tensors, which have shapes, but no memory and no values. They may be on "cuda" without a GPU. A model is captured on the
    GPU of the hardware, if that has one.
    inputs: of a model: a sequence of arguments, or a mapping by name; only their shapes matter. optimizer: of a model: makes it
    from the parameters; default: `torch.optim.AdamW`. loss: of a model: the loss from what the model returns; default: that
    itself, or its attribute `loss`.
    hardware: "h100", "h200", "a100", "rtx4090", "rtx5090", "laptop", or a file that describes a machine. name: of the trace.
    subgroup_bytes: how much of the optimizer is updated at once, parameters, gradients and states together.
    tokens, samples: how many a step processes, so that the trace tells them a second. It has the model's operations, too.
    lengths: the shortest and the longest of inputs of varying length: the function that takes one step gets a length then, and
    compiles its model with `dynamic=True`. The trace is of the longest, and tells sizes and times at all lengths between.
    device_bytes: the memory budget for which the graphs are compiled: what is too large for it runs in tiles; default: none.

    Waits until the step has run some times: seconds for small models, minutes for large ones. Raises UnsupportedError if the step
    depends on values of tensors or on a GPU's driver, does not repeat, or if teraio is training in this process; OptionsError for
    unknown hardware.
    """
    from teraio import capturing

    return capturing.capture(
        model_or_training,
        inputs,
        optimizer=optimizer,
        loss=loss,
        hardware=hardware,
        name=name,
        subgroup_bytes=subgroup_bytes,
        tokens=tokens,
        samples=samples,
        lengths=lengths,
        device_bytes=device_bytes,
    )


def status() -> tuple[Status, ...]:
    """Return what every training run of this process is doing, in order of creation. Never waits for copies or plans."""
    return tuple(run.status() for run in _registry().runs())


def on_iteration(watcher: Callable[[IterationStats], None]) -> Callable[[], None]:
    """Call `watcher` after each iteration of every training run of this process. Return a function that ends this.

    watcher: training waits for it, and what it raises, the training loop raises. On a GPU it is called one iteration late, when
    the times are known.
    """
    return _registry().on_iteration(watcher)


def step_done() -> None:
    """Say that an iteration has ended: for loops whose updates are not steps of a `torch.optim` optimizer.

    Call it after each update, from the first one on. From the first call on, nothing else ends iterations. On a GPU it may wait
    until the device has finished the iteration before.
    """
    for run in _registry().runs():
        run.step_done()


def wait_for_plan(timeout_seconds: float | None = None) -> bool:
    """Wait until no plan is being made, or until the time is over. Return whether none is being made.

    The plan takes over at the end of the iteration.
    """
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    return all(run.background.wait(None if end is None else max(end - time.monotonic(), 0.0)) for run in _registry().runs())


def on_device(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Keep these tensors (parameters, gradients, outputs of compiled models) on their device within the `with` block.

    Between compiled regions a tensor may wait in another tier. On CPU it can be used all the same, but slower. On a GPU, using a
    tensor that waits on a drive raises an error. Give few tensors at once: together they must fit the budget, else BudgetError
    is raised. Waits until the tensors are on the device.
    """
    return _registry().on_device(tensors)


def park() -> Parked:
    """Let everything leave the device that can, between two regions, so that another program can use it meanwhile.

    Blocks go to the lower tiers, PyTorch gives its free memory back, and no copy is under way when it returns. The next compiled
    region or optimizer step brings back what it needs, and goes on by the same plan; iterations are not timed until then. Each
    rank parks its own device. Returns what has left, and what stays and why, in bytes:

    >>> with teraio.park() as parked:  # doctest: +SKIP
    ...     generate()

    Waits until all copies have ended. Raises StorageError if one failed, UnsupportedError if another thread trains now.
    """
    return _registry().park()


def manage_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    master_weights: bool = False,
    independent: Literal["parameters", "elements"] | None = None,
) -> None:
    """Bring the steps and states of an optimizer under the budget. Only four cases need it:

    - with the option `optimizer: "off"`, for optimizers that are to be managed all the same;
    - for an optimizer that has states before its first step (loaded from a checkpoint): without this call, its states count only
      from that step on;
    - for `master_weights`;
    - for `independent`, with an optimizer of your own.

    The call itself never moves anything to another tier. On CPU it waits while existing states are copied to memory that can be
    moved later. The optimizer stays the user's.

    master_weights: bf16 and fp16 parameters are updated from copies in fp32, which are the states "master_param". All other
    states are in fp32, too. This holds from now on, also where teraio does not manage the steps; no other call undoes it. Call it
    before `load_state_dict`, which then keeps these states in fp32. If a parameter differs from its rounded master, because
    other weights were loaded, the master takes the parameter's value.

    independent: you promise that the update of an optimizer outside of torch.optim computes each parameter, or each element of
    it, from its own gradient and states alone, and that its `step` changes nothing else. Then it runs in subgroups, as those of
    torch.optim do; with "elements", also by slices and on the host. A trial with small tensors, which changes nothing, looks for
    the opposite first.

    Raises OptionsError for another `independent`; UnsupportedError if it is no `torch.optim.Optimizer`, or if the trial breaks
    the promise. With `master_weights`, also if the optimizer cannot be updated subgroup by subgroup; a later step raises it if
    the optimizer has other step hooks than teraio's.
    """
    _registry().manage_optimizer(optimizer, master_weights=master_weights, independent=independent)


def reset() -> None:
    """End all training runs: bring blocks back to the device, and remove the spill files. Waits until that is done.

    On a GPU all blocks come back if it has room for all. Otherwise, and on the CPU, as many come back as the budget holds. The
    others stay where they wait, without a name in the file system, as long as their tensors live: on the CPU they are read and
    written there, on a GPU those in the host tier are, and those on drives raise an error. The next run takes them over.
    Compiled models must be compiled again (`torch._dynamo.reset()`) before they train on.
    """
    _registry().reset()
