"""Compiling a model in place: it stays the object that it is, and its calls run compiled."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo.eval_frame import reset_code
from torch._C._functorch import peek_interpreter_stack

from teraio.backend import Backend
from teraio.options import parse_options

logger = logging.getLogger("teraio")

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compile_in_place(model: Compiled, options: Mapping[str, Any], *, dynamic: bool | None, fullgraph: bool) -> Compiled:
    """Compile a module in place and return it; return the compiled function if it is no module. Raises OptionsError.

    `torch.nn.Module.compile` would compile nothing of a module whose `forward` is PyTorch's own, such as `torch.nn.Sequential`:
    Dynamo skips such a frame, unless a frame of another file calls it.
    """
    backend = Backend(parse_options(options))  # parsed here, so that an error shows the line of the mistake
    given: dict[str, Any] = {"backend": backend, "dynamic": dynamic, "fullgraph": fullgraph}
    if not isinstance(model, torch.nn.Module):
        return cast(Compiled, torch.compile(model, **given))

    model._compiled_call_impl = torch.compile(_with_code_of_its_own(_caller(model)), **given)
    return model


def _caller(self: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that runs the module. The name `self` is left out of the names of stages and blocks."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # Dynamo leaves this out of what it compiles
            _tell_of_transforms()
        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return call


def _tell_of_transforms() -> None:
    """Say that Dynamo has left out a call because `torch.func.grad`, `vmap` or the like is around it; it says nothing itself."""
    if peek_interpreter_stack() is not None:
        _tell_once()


@functools.cache
def _tell_once() -> None:
    logger.warning(
        "torch.func.grad, vmap and the like around a compiled model run it uncompiled: nothing of it moves, and no budget "
        "holds. Call backward() on its loss, or torch.autograd.grad"
    )


def _with_code_of_its_own(function: Callable[..., Any]) -> FunctionType:
    """Return an equal function that Dynamo knows nothing of: it keeps what it compiled, and counts it, by code object.

    So a model that is compiled again really is, and models do not use up each other's limit of recompilations. What Dynamo has
    compiled goes with the function: the code object and it hold each other, which Python's garbage collector does not see.
    """
    known = cast(FunctionType, function)
    fresh = FunctionType(known.__code__.replace(), known.__globals__, known.__name__, known.__defaults__, known.__closure__)
    fresh.__kwdefaults__ = known.__kwdefaults__
    weakref.finalize(fresh, reset_code, fresh.__code__).atexit = False
    return fresh
