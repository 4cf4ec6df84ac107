"""The benchmark of machines with several GPUs: what they share, and what its figures say."""

from dataclasses import replace

import pytest

from benchmarks.nodes import GPU, LLAMA, NODES, TRAININGS, node
from benchmarks.planner_ranks import figures_of, seconds_of
from benchmarks.transformer_trace import LLAMA_3_8B
from planner import Budgets, Plan, Trace, plan, plan_node


def test_machines_have_four_drives_a_gpu_or_four_in_all() -> None:
    assert [each.ranks for each in NODES] == [2, 8, 2, 8]
    assert GPU.storage_read_bytes_per_second == pytest.approx(4 * 6.7e9)
    own, shared = node(8), node(8, shared_drives=4)
    assert {link for rate in own.shared for link in rate.links} == {"device->host", "host->device"}
    assert [rate.bytes_per_second for rate in shared.shared[1:]] == pytest.approx([26.0e9, 26.8e9])
    assert own.host_memory_bytes == 8 * GPU.host_memory_bytes
    assert len({training.name for training in TRAININGS}) == len(TRAININGS)


def test_sharing_drives_costs_and_is_told() -> None:
    small = replace(LLAMA, model=replace(LLAMA_3_8B, layers=1), batch=1)
    training = replace(TRAININGS[4], workloads=(small,))
    assert training.name == "2 GPUs, 4 drives in all, drives"

    def make(trace: Trace, budgets: Budgets, known: tuple[Plan, ...]) -> Plan:
        return plan(trace, replace_device(budgets), policy="teraio", incumbents=known, lower_bound=False)

    def replace_device(budgets: Budgets) -> Budgets:
        return budgets.model_copy(update={"device_bytes": 12_000_000_000})

    found = plan_node(training.node, training.traces(), training.budgets(), make=make)
    ideal, alone, apart, together = seconds_of(training, found)
    assert ideal <= alone < together <= apart
    costs, gains = figures_of(training, found, 1.0)
    assert costs.value == together / alone and gains.value == apart / together and gains.met
