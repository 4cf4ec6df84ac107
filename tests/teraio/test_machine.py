"""What the trace says of the machine follows from what was measured."""

from pathlib import Path

import pytest
import torch

from runtime.engine import LinkRates
from teraio import machine as machine_module
from teraio.machine import Machine
from teraio.options import parse_options


def rates(duplex_write: float, duplex_read: float) -> LinkRates:
    return LinkRates(
        write_bytes_per_second=1e9,
        read_bytes_per_second=3e9,
        write_latency_seconds=1e-4,
        read_latency_seconds=1e-4,
        duplex_write_bytes_per_second=duplex_write,
        duplex_read_bytes_per_second=duplex_read,
    )


@pytest.mark.parametrize(
    ("duplex_write", "duplex_read", "together"), [(0.5e9, 2e9, 2.5e9), (1e9, 2.7e9, 3.7e9), (0.95e9, 2.95e9, None)]
)
def test_drives_that_slow_each_other_down_share_a_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duplex_write: float, duplex_read: float, together: float | None
) -> None:
    monkeypatch.setattr(machine_module, "_measured_rates", lambda *_: rates(duplex_write, duplex_read))
    machine = Machine(parse_options({"storage": tmp_path, "memory_budget": "1GiB"}), torch.device("cpu"))
    try:
        hardware = machine.hardware()
    finally:
        machine.close()
    assert {link.name: link.bytes_per_second for link in hardware.links} == {"device->storage": 1e9, "storage->device": 3e9}
    if together is None:
        assert hardware.shared == ()
    else:
        (shared,) = hardware.shared
        assert shared.bytes_per_second == together
        assert set(shared.links) == {"device->storage", "storage->device"}
