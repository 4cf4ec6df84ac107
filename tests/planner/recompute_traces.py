"""Traces with recompute groups: a small one whose numbers can be worked out by hand."""

from __future__ import annotations

from typing import Any

from planner import Trace

from .strategies import hardware


def layers(count: int = 3, *, rate: float = 10.0, changed: tuple[int, ...] = ()) -> Trace:
    """A chain of `count` forward stages of 1 s, each of which makes 10 bytes from those of the stage before, and back.

    Backward stage i reads what forward stage i made. Every forward stage is a recompute group with the same number. Block i is
    what stage i makes; the last block is a weight of 10 bytes that all stages read. `changed`: stages that write the weight.
    """
    last = 2 * count - 1
    blocks: list[dict[str, Any]] = [
        {
            "id": i,
            "name": f"a{i}",
            "kind": "activation",
            "size_bytes": 10,
            "persistent": False,
            "reads": sorted({i + 1, last - i}),
            "writes": [i],
        }
        for i in range(count)
    ]
    weight = {"id": count, "name": "w", "kind": "parameter", "size_bytes": 10, "persistent": True}
    blocks.append({**weight, "reads": list(range(2 * count)), "writes": list(changed)})
    phases = ["forward"] * count + ["backward"] * count
    names = [f"forward/{i}" for i in range(count)] + [f"backward/{i}" for i in reversed(range(count))]
    stages = zip(names, phases, strict=True)
    return Trace.model_validate(
        {
            "name": "layers",
            "hardware": hardware(rate=rate),
            "stages": [
                {"id": n, "name": name, "phase": phase, "duration_seconds": 1.0} for n, (name, phase) in enumerate(stages)
            ],
            "blocks": blocks,
            "recompute": [
                {
                    "id": i,
                    "stage": i,
                    "blocks": [i],
                    "reads": [i - 1, count] if i else [count],
                    "duration_seconds": 1.0,
                    "workspace_bytes": 1,
                }
                for i in range(count)
            ],
        }
    )
