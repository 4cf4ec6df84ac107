"""Compile time of the first iteration by depth. teraio compiles equal stages once."""

import tempfile
from statistics import median

from benchmarks.results import Figure
from benchmarks.turns import Scale, workers

DEPTHS = (4, 8, 16)


def compile_seconds(scale: Scale, backend: str, layers: int) -> float:
    """Return the time of the first step minus that of later ones, with an empty cache and a started compiler."""
    name = f"compile {backend} {layers}"
    with tempfile.TemporaryDirectory(prefix="compile-") as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache}
        setting = scale.setting(backend, layers=layers).model_copy(update={"ready_compiler": True})
        with workers({name: setting}, scale.output, environment) as running:
            first, *later = [running[name].step().seconds for _ in range(4)]
    return first - median(later)


def measure(scale: Scale) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return the seconds of each backend at each depth, and their growth from the least depth to the greatest."""
    seconds = {backend: [compile_seconds(scale, backend, layers) for layers in DEPTHS] for backend in ("inductor", "teraio")}
    figures = []
    for backend, values in seconds.items():
        for layers, value in zip(DEPTHS, values, strict=True):
            figures.append(Figure(name=f"{backend}, {layers} layers", value=value, unit="s"))
        growth = values[-1] / values[0]
        name = f"{backend}, {DEPTHS[-1]} layers / {DEPTHS[0]} layers"
        figures.append(Figure(name=name, value=growth, unit=""))
    return tuple(figures), seconds
