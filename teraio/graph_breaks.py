"""Why Dynamo has not compiled code."""

from __future__ import annotations

import sys

_REASONS = 3
"""Reasons of graph breaks that a message names."""


def graph_break_reasons() -> str:
    """Return why Dynamo did not compile code, in brackets; "" if it has not said so."""
    counted = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    texts = [*counted.get("graph_break", ()), *counted.get("unimplemented", ())]
    reasons = list(dict.fromkeys(text.splitlines()[0] for text in texts if text))[:_REASONS]
    return f" (graph breaks: {'; '.join(reasons)})" if reasons else ""
