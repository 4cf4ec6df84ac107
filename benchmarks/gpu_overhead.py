"""Cost of stages for a Llama when everything fits: teraio without a budget compared with Inductor."""

from benchmarks.alone import Run, Runner, speed
from benchmarks.results import Figure

SIZES = {"cuda": ("gpt2-124m", "llama-3.2-1b"), "cpu": ("tiny",)}


def measure(runner: Runner) -> tuple[Figure, ...]:
    """Return the tokens per second of both and their ratio, for every size."""
    figures = []
    for size in runner.scale.sizes or SIZES[runner.scale.device]:
        plain, staged = (runner.plain(size, backend) for backend in ("inductor", "teraio"))
        figures += [speed(f"{size}, Inductor", plain), speed(f"{size}, teraio without a budget", staged)]
        ratio = None
        if isinstance(plain, Run) and isinstance(staged, Run):
            ratio = staged.tokens_per_second / plain.tokens_per_second
        figures.append(Figure(name=f"{size}: teraio / Inductor", value=ratio, unit="", aim=">= 0.97"))
    return tuple(figures)
