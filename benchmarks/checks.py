"""What the options `checksums` and `debug` cost: training under half of the memory with each of them, and with neither."""

from statistics import median

from benchmarks.budgets import budgeted
from benchmarks.results import Figure
from benchmarks.turns import Scale, ratios, spread, take_turns, tensor_peak, warm_up, workers

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]

OPTIONS = ("checksums", "debug")


def measure(scale: Scale) -> Measured:
    """Return the median ratios of the rounds. All three take turns in each round."""
    scale = scale.with_small_layers()
    plain = budgeted(scale, tensor_peak(scale.setting(), "peak", scale.output) // 2)
    settings = {"neither": plain}
    settings |= {name: plain.model_copy(update={"options": plain.options | {name: True}}) for name in OPTIONS}
    with workers(settings, scale.output) as running:
        phases = {name: warm_up(worker, 6) for name, worker in running.items()}
        taken = take_turns(running, 2 * scale.rounds)
    seconds = {name: [step.seconds for step in steps] for name, steps in taken.items()}
    figures = []
    for name, steps in taken.items():
        figures.append(Figure(name=name, value=median(seconds[name]), unit="s", note=f"teraio's phase: {phases[name]}"))
        for link, moved in steps[-1].moved_bytes.items():
            per_step = (moved - steps[-2].moved_bytes[link]) / 1e9
            figures.append(Figure(name=f"{name}, {link}", value=per_step, unit="GB", note="in the last iteration"))
        if name in OPTIONS:
            by_round = ratios(seconds[name], seconds["neither"])
            figures.append(Figure(name=f"{name} / neither", value=median(by_round), unit="", note=spread(by_round)))
    return tuple(figures), seconds
