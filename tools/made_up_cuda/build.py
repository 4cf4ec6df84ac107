"""Builds the made-up driver for the torch of this environment, into a folder of its own for each torch and each source."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.site_folder import write_metadata

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FOLDER = ROOT / "build" / "made-up-cuda"
ROOM_BYTES = 64 << 20
DRIVER, NUMBERS = "libmade_up_cuda.so", "libtrue_numbers.so"
STANDS_FOR = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries that are opened by name. They are links to the driver: all who use CUDA must see the same one."""

CUDA_TORCH = "python -m pip install torch (from PyPI: for Linux that is the build for CUDA, 2.5 GB with what it needs)"
HEADERS = "python -m pip install nvidia-cuda-runtime nvidia-cuda-crt (of the CUDA version of torch)"


class BuildError(Exception):
    """Something that the made-up GPU needs is missing. The message says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Torch:
    """An installed torch. cuda: the version it is built for."""

    folder: Path
    version: str
    cuda: str

    @property
    def headers(self) -> list[Path]:
        """Folders with CUDA's and torch's headers. Raises BuildError if the ones of CUDA are not there."""
        cuda = [path.parent for path in _nvidia("cuda_runtime_api.h") if (path.parent / "cuda.h").exists()]
        if not cuda:
            raise BuildError(f"no CUDA headers (cuda.h, cuda_runtime_api.h) beside torch {self.version}: {HEADERS}")
        if not any((folder / "crt" / "host_defines.h").exists() for folder in cuda):
            raise BuildError(f"{cuda[0]} has no crt/host_defines.h: {HEADERS}")
        return [*cuda, self.folder / "include"]

    @property
    def runtime(self) -> Path:
        """The real libcudart, of which every function must be made up or say that it is not."""
        found = _nvidia("libcudart.so.*")
        if not found:
            raise BuildError(f"no libcudart beside torch {self.version}: {CUDA_TORCH}")
        return found[0]


def installed_torch() -> Torch:
    """Return the torch of this environment, without importing it. Raises BuildError if it is not built for CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"{sys.executable} has no torch: {CUDA_TORCH}")
    folder = Path(spec.origin).parent
    known: dict[str, str | None] = {}
    exec((folder / "version.py").read_text(), known)
    version, cuda = known["__version__"], known["cuda"]
    if cuda is None:
        raise BuildError(f"torch {version} of {sys.executable} is built without CUDA: {CUDA_TORCH}")
    return Torch(folder, str(version), cuda)


def build() -> Path:
    """Build what is not built yet. Return the folder with the libraries. Raises BuildError if something is missing."""
    torch = installed_torch()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++ 11 or later (apt-get install g++), or name one by CXX")
    sources = sorted([*HERE.glob("driver/*"), *HERE.glob("*.cpp")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [*sources, Path(__file__)]))
    folder = FOLDER / f"torch-{torch.version}-{digest.hexdigest()[:12]}"
    if (folder / "ready").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    flags = [compiler, "-std=c++20", "-shared", "-fPIC", *(f"-I{path}" for path in torch.headers)]
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        raise BuildError(f"{folder} has {free:,} bytes free, the made-up GPU needs {ROOM_BYTES:,}: make room there")
    (folder / "missing.cpp").write_text(missing_functions(torch.runtime))
    driver = [*map(str, HERE.glob("driver/*.cpp")), str(folder / "missing.cpp")]
    compile_library(
        [*flags, "-O2", "-g", "-fvisibility=hidden", f"-I{HERE / 'driver'}", *driver, "-ldl", "-lpthread"], folder / DRIVER
    )
    libraries = torch.folder / "lib"
    of_torch = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10", "-lc10_cuda"]
    compile_library(
        [*flags, "-O1", f"-I{HERE}", str(HERE / "true_numbers.cpp"), *of_torch, f"-L{folder}", "-lmade_up_cuda"], folder / NUMBERS
    )
    for name in STANDS_FOR:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(DRIVER)
    # PyTorch calls this entry point at the end of `import torch`, in every process. Those of teraio are in its own metadata.
    entry = {"torch.backends": {"made_up_cuda": "tools.made_up_cuda.true_numbers:install"}}
    write_metadata(folder / "site", {"name": "made_up_cuda", "version": "1", "entry-points": entry})
    write_metadata(folder / "site", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    (folder / "ready").touch()
    return folder


def compile_library(command: list[str], target: Path) -> None:
    part = target.with_suffix(f".{os.getpid()}")  # another process may build the same
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-500:])
        raise BuildError(f"{target.name} cannot be built with {command[0]}: {first}")
    part.rename(target)


def _nvidia(pattern: str) -> list[Path]:
    """Files of the packages of NVIDIA that pip has installed, or of a toolkit named by CUDA_HOME."""
    folders = [Path(sysconfig.get_path("purelib")) / "nvidia"]
    if "CUDA_HOME" in os.environ:
        folders.append(Path(os.environ["CUDA_HOME"]))
    return [path for folder in folders for path in sorted(folder.rglob(pattern))]


def missing_functions(runtime: Path) -> str:
    """Return code for the functions of libcudart that are not made up: each says its name. Else the real ones would be called."""
    made = set()
    for path in HERE.glob("driver/*.cpp"):
        made.update(re.findall(r"^EXPORTED [^;{}()]*?\b(\w+)\(", path.read_text(), re.MULTILINE))
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(runtime)], capture_output=True, text=True, check=True).stdout
    names = sorted(set(re.findall(r" T (_{0,2}cuda\w+)@", symbols)) - made)
    function = 'extern "C" __attribute__((visibility("default"))) int {0}() {{ return made_up_missing("{0}"); }}'
    return "\n".join(['extern "C" int made_up_missing(const char*);', *(function.format(name) for name in names), ""])
