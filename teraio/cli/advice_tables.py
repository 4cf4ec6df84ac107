"""Advice as a table."""

from __future__ import annotations

from teraio.advice import Advice, Answer
from teraio.cli.tables import Page, exact_bytes, facts, format_bytes, format_seconds, limit_bytes, plain, table_of

__all__ = ["advice_tables"]


def advice_tables(advice: Advice) -> Page:
    """What was asked for, then each change beside it."""
    asked = advice.answers[0]
    overview = facts(
        ("trace", advice.trace_name),
        ("device budget", exact_bytes(asked.budgets.device_bytes)),
        ("host budget", limit_bytes(asked.budgets.host_bytes)),
        ("storage budget", limit_bytes(asked.budgets.storage_bytes)),
        ("smallest device budget", exact_bytes(asked.floor_bytes)),
        ("peak if nothing moves", exact_bytes(asked.peak_bytes)),
        ("does it fit", asked.fit if asked.predicted is not None else f"{asked.fit}: {asked.reason}"),
        ("what holds it up", asked.holds_up or ("computation" if asked.predicted is not None else "")),
    )
    table = table_of(
        "case", "fits", ">iteration", ">without waiting", ">speed", "held up by", ">recomputed", ">written a day", ">drives last"
    )
    for answer in advice.answers:
        table.add_row(plain(answer.what), answer.fit, *_row(answer))
    return overview, table


def _row(answer: Answer) -> tuple[str, ...]:
    predicted = answer.predicted
    if predicted is None:
        return ("",) * 7
    return (
        format_seconds(predicted.iteration_seconds),
        format_seconds(answer.ideal_seconds),
        "" if answer.speed is None else f"{answer.speed:.2f}x",
        answer.holds_up or "computation",
        format_seconds(predicted.recompute_seconds) if predicted.recompute_seconds else "",
        format_bytes(answer.written_bytes_per_day) if answer.written_bytes_per_day else "nothing",
        "" if answer.lifetime_days is None else f"{answer.lifetime_days:,.0f} days",
    )
