"""What running stage by stage costs when everything fits: teraio without a budget against Inductor."""

from statistics import median

from benchmarks.results import Figure
from benchmarks.turns import Scale, take_turns, warm_up, workers

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]


def measure(scale: Scale) -> Measured:
    """The ratio of the medians, from turns of both."""
    settings = {name: scale.setting(name) for name in ("inductor", "teraio")}
    with workers(settings, scale.output) as running:
        phases = {name: warm_up(worker, 4) for name, worker in running.items()}
        taken = take_turns(running, scale.rounds)
    seconds = {name: [step.seconds for step in steps] for name, steps in taken.items()}
    middle = {name: median(values) for name, values in seconds.items()}
    note = f"teraio's phase: {phases['teraio']}"
    figures = (
        Figure(name="Inductor", value=middle["inductor"], unit="s"),
        Figure(name="teraio without a budget", value=middle["teraio"], unit="s", note=note),
        Figure(name="teraio / Inductor", value=middle["teraio"] / middle["inductor"], unit="", aim="<= 1.03"),
    )
    return figures, seconds
