"""Fail with a message if packages are missing or torch sees no GPU, so that GPU targets never pass without one."""

import sys

import torch

from tools import gpu_wheels


def main() -> int:
    """Return 0 and print the name of the GPU; return 1 if there is none, or if teraio lacks packages. Print what is missing."""
    if not gpu_wheels.report():
        return 1
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(
            f"no GPU: torch.cuda.is_available() is false (torch {torch.__version__}, {build}).\n"
            "This needs an NVIDIA GPU and a torch built for CUDA. To use one that is installed already:\n"
            "  make test-gpu PYTHON=/path/to/python3 NO_VENV=1",
            file=sys.stderr,
        )
        return 1
    print(f"GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
