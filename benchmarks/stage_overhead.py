"""Cost of stages when everything fits: teraio without a budget compared with Inductor."""

from statistics import median

from benchmarks.results import Figure
from benchmarks.turns import Scale, ratios, spread, take_turns, warm_up, workers

Measured = tuple[tuple[Figure, ...], dict[str, list[float]]]


def measure(scale: Scale) -> Measured:
    """Return the median ratio of the rounds. Both variants take turns in each round."""
    settings = {name: scale.setting(name) for name in ("inductor", "teraio")}
    with workers(settings, scale.output) as running:
        phases = {name: warm_up(worker, 4) for name, worker in running.items()}
        taken = take_turns(running, 2 * scale.rounds)
    seconds = {name: [step.seconds for step in steps] for name, steps in taken.items()}
    middle = {name: median(values) for name, values in seconds.items()}
    note = f"teraio's phase: {phases['teraio']}"
    by_round = ratios(seconds["teraio"], seconds["inductor"])
    figures = (
        Figure(name="Inductor", value=middle["inductor"], unit="s"),
        Figure(name="teraio without a budget", value=middle["teraio"], unit="s", note=note),
        Figure(name="teraio / Inductor", value=median(by_round), unit="", aim="<= 1.03", note=spread(by_round)),
    )
    return figures, seconds
