"""The made-up GPU itself: what it does in order, what it refuses, and the line with which it ends a process that misuses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from .training import MADE_UP

pytestmark = pytest.mark.skipif(not MADE_UP, reason="tests the made-up GPU: python -m tools.made_up_cuda")

PRELUDE = """
import ctypes, os
cuda = ctypes.CDLL(os.environ["MADE_UP_CUDA_FOLDER"] + "/libmade_up_cuda.so")
MIB, KEEP = 1 << 20, []
cuda.made_up_wait.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_double]

def made(function, *arguments):
    pointer = ctypes.c_void_p()
    assert getattr(cuda, function)(ctypes.byref(pointer), *arguments) == 0
    return pointer

def stream(flags=1):
    return made("cudaStreamCreateWithFlags", flags)

def busy(stream, seconds=0.3):
    cuda.made_up_wait(stream, b"a kernel", seconds)

def copy(target, source, size, stream, kind=4):
    return cuda.cudaMemcpyAsync(target, source, ctypes.c_size_t(size), kind, stream)

def memory(size):
    return made("cudaMalloc", ctypes.c_size_t(size))

def pinned(size):
    return made("cudaHostAlloc", ctypes.c_size_t(size), 0)
"""


def run(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run code that calls the driver, in a process without PyTorch."""
    environment = {**os.environ, **settings}
    return subprocess.run([sys.executable, "-c", PRELUDE + code], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            "copy(memory(MIB), pinned(4 * MIB), 3 * MIB, stream())",
            "copy of 3145728 bytes .* touches device memory that is not mapped",
        ),
        ("p = memory(MIB); cuda.cudaFree(p); cuda.cudaFree(p)", r"cudaFree of 0x\w+, which is not allocated \(freed twice\?\)"),
        (
            "import mmap; m = mmap.mmap(-1, MIB); p = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
            "assert cuda.cudaHostRegister(p, ctypes.c_size_t(MIB), 0) == 0\n"
            "s = stream(); busy(s); copy(memory(MIB), p, MIB, s); cuda.cudaHostUnregister(p)",
            "1048576 bytes at .* are unregistered while the queued copy still uses 1048576 bytes",
        ),
        (
            "a = made('cuMemAddressReserve', ctypes.c_size_t(2 * MIB), ctypes.c_size_t(0), None, ctypes.c_ulonglong(0))\n"
            "h = made('cuMemCreate', ctypes.c_size_t(2 * MIB), None, ctypes.c_ulonglong(0))\n"
            "cuda.cuMemMap(a, ctypes.c_size_t(2 * MIB), ctypes.c_size_t(0), h, ctypes.c_ulonglong(0))\n"
            "cuda.cuMemSetAccess(a, ctypes.c_size_t(2 * MIB), None, ctypes.c_size_t(0))\n"
            "s = stream(); busy(s); copy(a, pinned(MIB), MIB, s); cuda.cuMemUnmap(a, ctypes.c_size_t(2 * MIB))",
            "2097152 bytes at .* are unmapped while the queued copy still uses 1048576 bytes",
        ),
    ],
)
def test_misuse_ends_the_process_with_a_line_that_names_it(code: str, line: str) -> None:
    ended = run(code)
    assert ended.returncode == -6, ended.stderr
    (told,) = [text for text in ended.stderr.splitlines() if text.startswith("made-up CUDA: ")]
    assert re.search(line, told), told


@pytest.mark.parametrize(
    "code",
    [
        # A stream is late, and events tell when it has got there.
        "s, e = stream(), made('cudaEventCreate'); assert cuda.cudaEventQuery(e) == 0; busy(s); cuda.cudaEventRecord(e, s)\n"
        "assert cuda.cudaEventQuery(e) == 600 and cuda.cudaStreamQuery(s) == 600\n"
        "cuda.cudaEventSynchronize(e); assert cuda.cudaEventQuery(e) == 0",
        # The NULL stream waits for blocking streams; non-blocking ones take no part.
        "s, e = stream(0), made('cudaEventCreate'); busy(s); cuda.cudaEventRecord(e, None)\n"
        "assert cuda.cudaEventQuery(e) == 600; cuda.cudaEventSynchronize(e); s = stream(1); busy(s)\n"
        "cuda.cudaEventRecord(e, None); cuda.cudaEventSynchronize(e)\n"
        "assert cuda.cudaStreamQuery(s) == 600",
        # Pageable memory is taken before the call returns; pinned memory is read when the copy runs.
        "s, d = stream(), memory(MIB); pageable, host = ctypes.create_string_buffer(b'a' * MIB), pinned(MIB)\n"
        "ctypes.memset(host, 97, MIB); busy(s); copy(d, pageable, MIB, s); ctypes.memset(pageable, 98, MIB)\n"
        "back = ctypes.create_string_buffer(MIB); copy(back, d, MIB, s); assert back.raw == b'a' * MIB\n"
        "busy(s); copy(d, host, MIB, s); ctypes.memset(host, 98, MIB); copy(back, d, MIB, s); assert back.raw == b'b' * MIB",
        # A thread that has called nothing of the runtime has no context for calls of the driver.
        "import threading; d, h, s, found = memory(MIB), pinned(MIB), stream(), []\n"
        "def call(): found.append(cuda.cuMemcpyAsync(d, h, ctypes.c_size_t(MIB), s))\n"
        "def run(): call(); made('cudaEventCreate'); call()\n"
        "thread = threading.Thread(target=run); thread.start(); thread.join(); assert found == [201, 0]",
    ],
    ids=["late", "null stream", "pageable and pinned", "context"],
)
def test_it_does_as_a_real_driver(code: str) -> None:
    ended = run(code, MADE_UP_CUDA_DEVICE_BYTES=str(32 << 20), MADE_UP_CUDA_HOST_BYTES=str(32 << 20))
    assert ended.returncode == 0, ended.stderr


def test_what_is_not_made_up_says_so() -> None:
    ended = run("assert cuda.cudaMallocManaged(None, None, 0) == 801; assert cuda.cudaMallocManaged(None, None, 0) == 801")
    assert ended.returncode == 0 and ended.stderr == "made-up CUDA: cudaMallocManaged was called, which is not made up\n"
