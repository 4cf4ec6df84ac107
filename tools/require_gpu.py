"""Fails, and says why, where torch sees no GPU: the GPU targets are never silently green."""

import sys

import torch


def main() -> int:
    """Returns 0 and names the GPU where there is one, else 1."""
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
