"""Machines with several GPUs, and trainings on them: what the ranks share, from data sheets. Nothing here needs torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.machines import H100_NVL_TF32, Machine
from benchmarks.transformer_trace import LLAMA_3_8B, Workload
from benchmarks.variants import peak_bytes
from planner import Budgets, Node, NodeRate, Trace

DRIVE_READ_BYTES_PER_SECOND = 6.7e9
DRIVE_WRITE_BYTES_PER_SECOND = 6.5e9
"""What one PCIe 4.0 drive of the machine of Yuan et al. (NeurIPS 2025) reaches."""
HOST_MEMORY_BYTES_PER_SECOND = 490e9
"""Two sockets with eight channels of DDR5-4800 each: 614 GB/s, of which 0.8 is attained."""
OUT, IN = "device->host", "host->device"
WRITE, READ = "device->storage", "storage->device"


def with_drives(machine: Machine, drives: int) -> Machine:
    """Return the machine with `drives` drives, all of them for its one GPU."""
    return replace(
        machine,
        name=f"{machine.name}, {drives} drives",
        storage_read_bytes_per_second=DRIVE_READ_BYTES_PER_SECOND * drives,
        storage_write_bytes_per_second=DRIVE_WRITE_BYTES_PER_SECOND * drives,
    )


GPU = with_drives(H100_NVL_TF32, 4)
"""Four drives a GPU, as Yuan et al. have. They measured two GPUs; here are eight as well."""


def node(gpus: int, *, shared_drives: int = 0) -> Node:
    """Return a machine with so many of these GPUs. shared_drives: drives that all have in common; 0: each has four.

    All GPUs share the rate of the host's memory, both directions together, and the memory itself.
    """
    rates: list[tuple[str, tuple[str, ...], float]] = [("host memory", (OUT, IN), HOST_MEMORY_BYTES_PER_SECOND)]
    if shared_drives:
        rates += [
            ("drives, writing", (WRITE,), DRIVE_WRITE_BYTES_PER_SECOND * shared_drives),
            ("drives, reading", (READ,), DRIVE_READ_BYTES_PER_SECOND * shared_drives),
        ]
    drives = f"{shared_drives} drives in all" if shared_drives else "4 drives each"
    return Node(
        name=f"{gpus} GPUs, {drives}",
        ranks=gpus,
        shared=tuple(NodeRate.model_validate({"name": n, "links": links, "bytes_per_second": r}) for n, links, r in rates),
        host_memory_bytes=gpus * GPU.host_memory_bytes,
    )


NODES = (node(2), node(8), node(2, shared_drives=4), node(8, shared_drives=4))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTraining:
    """A training on a machine. `workloads`: one for all ranks, or one for each. `host_tier`: whether blocks wait there too."""

    node: Node
    workloads: Sequence[Workload]
    host_tier: bool

    @property
    def name(self) -> str:
        """The machine, the tiers and, if ranks differ, their batches."""
        batches = " and ".join(str(workload.batch) for workload in self.workloads)
        differ = f", batches {batches}" if len(self.workloads) > 1 else ""
        return f"{self.node.name}, {'host and drives' if self.host_tier else 'drives'}{differ}"

    def traces(self) -> tuple[Trace, ...]:
        """Return the iteration of each rank."""
        made = tuple(workload.trace(GPU) for workload in self.workloads)
        return made if len(made) == self.node.ranks else made * self.node.ranks

    def budgets(self) -> tuple[Budgets, ...]:
        """Return the budgets of each rank: half of the peak, and of host memory what the machine's division gives, or nothing."""
        size = max(peak_bytes(trace) for trace in self.traces()) // 2
        return (Budgets(device_bytes=size, host_bytes=None if self.host_tier else 0),) * self.node.ranks


LLAMA = Workload(model=replace(LLAMA_3_8B, layers=8), batch=4, sequence=2048)
TRAININGS = (
    *(NodeTraining(node=each, workloads=(LLAMA,), host_tier=tier) for each in NODES for tier in (False, True)),
    NodeTraining(node=NODES[2], workloads=(LLAMA, replace(LLAMA, batch=2)), host_tier=False),
)
"""Every rank trains 8 of the 32 layers of Llama-3-8B in TF32 on 4 x 2048 tokens, with half of the memory that it needs; in the
last training, the second rank gets half of these tokens."""
