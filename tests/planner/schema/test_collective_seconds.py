"""The part of a stage in collectives: in the file only where there is some, and never longer than the stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import Trace, TraceError

HAND = Path(__file__).parents[3] / "traces" / "hand"


def test_it_is_in_the_file_only_where_there_is_some(tmp_path: Path) -> None:
    chain = Trace.load(HAND / "chain.json")
    first, *others = chain.stages
    changed = chain.rebuilt(stages=[first.model_copy(update={"collective_seconds": 0.25}), *others])
    changed.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert [stage.collective_seconds for stage in loaded.stages] == [0.25] + [0.0] * len(others)
    assert (tmp_path / "trace.json").read_text().count("collective_seconds") == 1
    same = loaded.rebuilt(stages=[stage.model_copy(update={"collective_seconds": 0.0}) for stage in loaded.stages])
    assert same.fingerprint == chain.fingerprint


def test_it_is_no_longer_than_the_stage(tmp_path: Path) -> None:
    text = (HAND / "chain.json").read_text()
    (tmp_path / "trace.json").write_text(
        text.replace('"duration_seconds": 1.0', '"duration_seconds": 1.0, "collective_seconds": 2', 1)
    )
    with pytest.raises(TraceError, match="stage 0 lasts 1.0 s, but spends 2.0 s in collectives"):
        Trace.load(tmp_path / "trace.json")
