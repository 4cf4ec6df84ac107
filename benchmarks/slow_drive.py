"""A worker whose drives are held to a rate: `python -m benchmarks.slow_drive`, see `examples.worker`."""

import functools
import os

from examples.worker import serve
from runtime.transfer import Engine

RATE = "BENCHMARK_DRIVE_BYTES_PER_SECOND"
"""The environment variable with the rate of each direction."""


if __name__ == "__main__":
    limited = functools.partialmethod(Engine.__init__, limit_bytes_per_second=float(os.environ[RATE]))
    Engine.__init__ = limited  # type: ignore[assignment]
    serve()
