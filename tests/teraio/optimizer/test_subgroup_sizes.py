"""The size of subgroups: chosen once from measured rates, or taken from a given plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import planner
from planner import Hardware, stations_of_step, subgroup_bytes
from planner.subgroup_size import UNMEASURED_BYTES
from teraio.optimizer.subgroups import MIN_SUBGROUP_BYTES, UPDATE_SECONDS, SubgroupSizes

from .. import virtual
from ..parity.harness import MIB, check_exact, share_of_peak, train
from ..parity.optimizers import small

GIB = 1 << 30
SIZES = [64 * MIB] * 64


def hardware(tiers: dict[str, float], host_bytes: int = 64 * GIB) -> Hardware:
    """With links to and from these tiers, of so many bytes per second."""
    rates = {link: rate for tier, rate in tiers.items() for link in (f"device->{tier}", f"{tier}->device")}
    return virtual.hardware(rates, latency=1e-4, host_memory_bytes=host_bytes, storage_bytes=GIB)


def test_the_size_is_chosen_once_from_what_is_measured() -> None:
    machine = hardware({"host": 1e10})
    sizes = SubgroupSizes(lambda: machine)
    assert sizes.used_bytes is None
    found = sizes.choose(SIZES, 4 * GIB)
    stations = stations_of_step(machine, "host", update_seconds=UPDATE_SECONDS)
    limits = {"smallest_bytes": MIN_SUBGROUP_BYTES, "largest_bytes": 4 * GIB // 8}
    assert found == sizes.used_bytes == subgroup_bytes(stations, total_bytes=sum(SIZES), **limits)
    assert MIN_SUBGROUP_BYTES < found < 4 * GIB // 8, "neither limit decided"
    for room in (GIB // 16, None):
        assert sizes.choose(SIZES[:3], room) == found


def test_where_nothing_is_measured() -> None:
    assert SubgroupSizes().choose(SIZES, 16 * MIB) == MIN_SUBGROUP_BYTES
    assert SubgroupSizes().choose(SIZES, 400 * MIB) == 50 * MIB
    no_links = SubgroupSizes(lambda: hardware({}))
    assert no_links.choose(SIZES, 64 * GIB) == UNMEASURED_BYTES
    no_limit = SubgroupSizes(lambda: hardware({"host": 1e10}))
    assert no_limit.choose(SIZES, None) == UNMEASURED_BYTES
    for few in ([MIB, 2 * MIB], [GIB]):  # one subgroup, which must not decide for an optimizer that comes later
        sizes = SubgroupSizes(lambda: hardware({"host": 1e10}))
        assert sizes.choose(few, GIB) == MIN_SUBGROUP_BYTES and sizes.used_bytes is None


def test_a_plan_brings_the_size_that_it_was_made_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training. What would be chosen the next time does not matter then."""

    def choose(size_bytes: int) -> None:
        monkeypatch.setattr(SubgroupSizes, "_best", lambda *_: size_bytes)

    case = small("AdamW", layers=4, planned=True, steps=8)
    paths = {"trace_out": tmp_path / "trace.json", "plan_out": tmp_path / "plan.json"}
    options = share_of_peak(case, tmp_path, 0.5)
    choose(16 * MIB)
    found = train(case, options={**options, **paths})
    trace, plan = planner.Trace.load(paths["trace_out"]), planner.Plan.load(paths["plan_out"])
    assert found.status.phase == "planned" and plan.subgroup_bytes == trace.subgroup_bytes > 8 * MIB
    count = len(trace.subgroups)
    assert 2 <= count <= 6, "at least one of eight parameters in each"
    choose(MIB)
    for given in (paths["plan_out"], None):
        again = train(case, options={**options, "trace_out": tmp_path / "again.json", "plan": given})
        assert again.status.phase == "planned"
        assert (len(planner.Trace.load(tmp_path / "again.json").subgroups) == count) == (given is not None)
        for result in (found, again):
            check_exact(result, train(case, backend=None))
