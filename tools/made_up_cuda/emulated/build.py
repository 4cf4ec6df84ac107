"""Builds the emulated GPU for the torch of this environment, and says in which environment a process runs on it."""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
import tomllib
from pathlib import Path

from tools.made_up_cuda.build import (
    DRIVER,
    FOLDER,
    ROOT,
    STANDS_FOR,
    BuildError,
    compile_library,
    installed_torch,
    missing_functions,
)
from tools.made_up_cuda.build import HERE as MADE_UP
from tools.site_folder import write_metadata

HERE = Path(__file__).parent
OPERATORS = "emulated_operators"
MACHINE_VARIABLE = "EMULATED_MACHINE"


def build() -> Path:
    """Build what is not built yet. Return the folder with the libraries. Raises BuildError if something is missing."""
    torch = installed_torch()
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler: install g++ 11 or later (apt-get install g++), or name one by CXX")
    driver = sorted(path for path in MADE_UP.glob("driver/*.cpp") if path.name != "streams.cpp")
    sources = [*driver, *sorted(MADE_UP.glob("driver/*.h*")), *sorted(HERE.iterdir())]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.is_file()))
    folder = FOLDER / f"emulated-torch-{torch.version}-{digest.hexdigest()[:12]}"
    if (folder / "ready").exists():
        return folder
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    (folder / "missing.cpp").write_text(missing_functions(torch.runtime))
    flags = [compiler, "-std=c++20", "-shared", "-fPIC", "-O2", "-DNDEBUG", *(f"-I{path}" for path in torch.headers)]
    own = [str(HERE / name) for name in ("timeline.cpp", "libraries.cpp")]
    made_up = [*map(str, driver), *own, str(folder / "missing.cpp")]
    compile_library([*flags, "-fvisibility=hidden", f"-I{MADE_UP / 'driver'}", *made_up, "-ldl", "-lpthread"], folder / DRIVER)
    of_torch = torch.folder / "include" / "torch" / "csrc" / "api" / "include"
    includes = [f"-I{of_torch}", f"-I{sysconfig.get_path('include')}", f"-DTORCH_EXTENSION_NAME={OPERATORS}", "-w"]
    libraries = [f"-L{torch.folder / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
    compile_library([*flags, *includes, str(HERE / "operators.cpp"), *libraries], site / f"{OPERATORS}.so")
    for name in STANDS_FOR:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(DRIVER)
    write_metadata(site, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])  # by which torch finds the backend
    (folder / "ready").touch()
    return folder


def environment(
    folder: Path, machine: str, *, capability: tuple[int, int], multiprocessors: int, device_bytes: int, host_bytes: int
) -> dict[str, str]:
    """Return what the environment of a process on the emulated GPU has besides. machine: for `MachineDescription.load`."""
    return {
        MACHINE_VARIABLE: machine,
        "MADE_UP_CUDA_CAPABILITY": str(10 * capability[0] + capability[1]),
        "MADE_UP_CUDA_MULTIPROCESSORS": str(multiprocessors),
        "MADE_UP_CUDA_DEVICE_BYTES": str(device_bytes),
        "MADE_UP_CUDA_HOST_BYTES": str(host_bytes),
        # An H100 took 5 to 11 ms for a retry of the allocator that gives back and maps some 100 MiB.
        "MADE_UP_CUDA_MAP_US": "20",
        "MADE_UP_CUDA_POISON": "0",
        "MADE_UP_CUDA_KERNELS": "nothing",
        "LD_PRELOAD": str(folder / DRIVER),
        "LD_LIBRARY_PATH": str(folder),
        "PYTHONPATH": f"{ROOT}:{folder / 'site'}",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
        # For all alike. Pages of 16 MiB hold what models are made of without a rest; of the usual 20 MiB, much lies idle.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True,large_segment_size_mb:16",
        "TERAIO_PLAN_CACHE": "off",
    }
