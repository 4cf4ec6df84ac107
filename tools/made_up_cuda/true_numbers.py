"""Called by PyTorch at the end of `import torch`, in each process that runs on the made-up GPU."""

from __future__ import annotations

import atexit
import ctypes
import os
from pathlib import Path

from tools.made_up_cuda.build import DRIVER, NUMBERS

FOLDER_VARIABLE, NUMBERS_VARIABLE = "MADE_UP_CUDA_FOLDER", "MADE_UP_CUDA_NUMBERS"


def install() -> None:
    """Let CUDA operators compute on the processor, unless the environment says that kernels do nothing."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or os.environ.get(NUMBERS_VARIABLE) == "none":
        return
    library = ctypes.CDLL(str(Path(folder) / NUMBERS))
    library.true_numbers_install()
    # Streams are threads: they must have ended their work before the libraries that they run are taken down.
    atexit.register(ctypes.CDLL(str(Path(folder) / DRIVER)).cudaDeviceSynchronize)
