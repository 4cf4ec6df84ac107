"""The results of the demo: measurements of a run, tables of them, and checks."""

from dataclasses import dataclass
from statistics import median

from rich.table import Table

from examples.training import Report, Step

LOSS_TOLERANCE = 1e-6
"""Relative. The same stages run on the same bytes, so the losses should be equal bit for bit. The tolerance is for machines whose
math library adds in another order in each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished training: its iterations in order, those that count for its speed, one of each turn, and its report."""

    name: str
    steps: tuple[Step, ...]
    turns: tuple[Step, ...]
    report: Report

    @property
    def seconds_per_iteration(self) -> float:
        """Median of the turns."""
        return median(step.seconds for step in self.turns)

    @property
    def file_bytes(self) -> int:
        """The most resident bytes of mapped files at the end of an iteration."""
        return max(step.resident_bytes["RssFile"] for step in self.steps)


def mebibytes(size_bytes: int) -> str:
    """Return `size_bytes` as text in MiB."""
    return f"{size_bytes / 2**20:,.0f} MiB"


def speed_line(first: Run, second: Run) -> str:
    """Return the speed of `second` over that of `first`, with its spread over turns: how busy the machine was."""
    speeds = [one.seconds / other.seconds for one, other in zip(first.turns, second.turns, strict=True)]
    return f"{median(speeds):.0%} of the speed (in {len(speeds)} turns from {min(speeds):.0%} to {max(speeds):.0%})"


def faults(first: Run, second: Run) -> list[str]:
    """Return the faults of `second`, which should have the same losses as `first` with half of the memory."""
    found = []
    for index, (one, other) in enumerate(zip(first.steps, second.steps, strict=True), start=1):
        if not abs(one.loss - other.loss) <= LOSS_TOLERANCE * abs(one.loss):
            found.append(f"the losses of iteration {index} disagree: {one.loss!r} and {other.loss!r}")
    allowed = first.report.peak_bytes // 2
    if second.report.peak_bytes > allowed:
        peak = mebibytes(second.report.peak_bytes)
        found.append(f"the resident set peaked at {peak}, over half of the first run's, {mebibytes(allowed)}")
    status = second.report.status
    if status is None or not status["moved_bytes"].get("device->storage"):
        return [*found, "nothing was moved to storage"]
    peak_bytes, budget_bytes = status["device_peak_bytes"], status["device_budget_bytes"]
    if peak_bytes > budget_bytes:
        found.append(f"tensors took {mebibytes(peak_bytes)}, over their budget of {mebibytes(budget_bytes)}")
    if not any(step.phase == "planned" for step in second.steps):
        found.append("the plan was not ready before the training ended: use more iterations")
    return found


def losses_table(first: Run, second: Run) -> Table:
    """Return both losses of each iteration, the times, and the phase of the second run."""
    table = Table(title="losses (nats per byte)")
    for heading in ("iteration", first.name, second.name, "equal", "seconds", "phase"):
        table.add_column(heading, justify="right")
    for index, (one, other) in enumerate(zip(first.steps, second.steps, strict=True), start=1):
        equal = "yes" if one.loss == other.loss else f"{abs(one.loss - other.loss):.1e}"
        seconds = f"{one.seconds:.2f} / {other.seconds:.2f}"
        table.add_row(str(index), f"{one.loss:.6f}", f"{other.loss:.6f}", equal, seconds, other.phase)
    return table


def summary_table(first: Run, second: Run) -> Table:
    """Return peaks, times and bytes of both runs, side by side."""
    table = Table(title=f"GPT with {first.report.parameters / 1e6:.1f} million parameters")
    for heading in ("", first.name, second.name):
        table.add_column(heading, justify="left" if not heading else "right")
    runs = (first, second)
    table.add_row("peak resident set", *(mebibytes(run.report.peak_bytes) for run in runs))
    share = second.report.peak_bytes / first.report.peak_bytes
    table.add_row("  share of the first run's", "100 %", f"{share:.1%}")
    table.add_row("  of it mapped files, at most", *(mebibytes(run.file_bytes) for run in runs))
    table.add_row("AdamW's states, wherever they wait", *(mebibytes(run.report.state_bytes) for run in runs))
    table.add_row("seconds per iteration", *(f"{run.seconds_per_iteration:.2f}" for run in runs))
    statuses = [run.report.status or {} for run in runs]
    rows = (
        ("tensors' budget", "device_budget_bytes", mebibytes),
        ("tensors' peak, own account", "device_peak_bytes", mebibytes),
        ("iteration predicted, seconds", "predicted_iteration_seconds", "{:.2f}".format),
    )
    for label, key, form in rows:
        values = (status.get(key) for status in statuses)
        table.add_row(label, *("-" if value is None else form(value) for value in values))
    again = [(status.get("recomputed_stages", 0), status.get("recomputed_bytes", 0)) for status in statuses]
    table.add_row("recomputed in the last iteration", *(f"{count} stages, {mebibytes(size)}" for count, size in again))
    for direction in ("device->storage", "storage->device"):
        moved = (status.get("moved_bytes", {}).get(direction, 0) for status in statuses)
        table.add_row(f"moved {direction}, in all", *(mebibytes(size_bytes) for size_bytes in moved))
    return table
