"""Versions, compilers, solvers and drivers."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator

import torch

from planner.errors import UnsupportedError
from runtime.storage import load_kvikio
from runtime.system import storage_swap
from teraio.doctor.finding import Finding

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 11)


def software() -> Iterator[Finding]:
    """Yield what is installed. Compiles a small C++ file if that has not been done before, which takes seconds."""
    python = sys.version_info[:2]
    yield Finding(
        what="Python",
        verdict="ok" if python >= _OLDEST_PYTHON else "missing",
        found=platform.python_version(),
        remedy="" if python >= _OLDEST_PYTHON else "install Python 3.11 or later",
    )
    yield _torch()
    yield _compiler()
    yield Finding(what="solver", verdict="ok", found=f"HiGHS (highspy {importlib.metadata.version('highspy')})")
    if torch.version.cuda is not None:
        yield from _cuda(torch.version.cuda)


def _torch() -> Finding:
    known = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    new_enough = known >= _OLDEST_TORCH
    return Finding(
        what="PyTorch",
        verdict="ok" if new_enough else "missing",
        found=torch.__version__,
        remedy="" if new_enough else "pip install 'torch>=2.11'",
    )


def _compiler() -> Finding:
    try:
        storage_swap.address(torch.empty(1).untyped_storage())
    except UnsupportedError as error:
        return Finding(
            what="C++ compiler",
            verdict="missing",
            found=str(error),
            effect="nothing can move",
            remedy="apt-get install g++, or name a compiler in the environment variable CXX",
        )
    return Finding(what="C++ compiler", verdict="ok", found="builds and loads native code")


def _cuda(version: str) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(
            what="GPU",
            verdict="missing",
            found=f"PyTorch is built for CUDA {version}, but sees no GPU",
            effect="training runs on the CPU",
            remedy="install NVIDIA's driver, and check with nvidia-smi that it sees the GPU",
        )
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            what=f"GPU {index}",
            verdict="ok",
            found=f"{torch.cuda.get_device_name(index)}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free",
        )
    try:
        kvikio = load_kvikio()
    except UnsupportedError as error:
        yield Finding(
            what="KvikIO",
            verdict="note",
            found=str(error),
            effect="drives are read and written through pinned host memory",
            remedy=f"pip install 'teraio[cuda{version.partition('.')[0]}]'",
        )
    else:
        yield Finding(what="KvikIO", verdict="ok", found=kvikio.__version__)
