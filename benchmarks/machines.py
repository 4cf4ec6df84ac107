"""GPUs with their links, from data sheets. Generated traces use their rates."""

from dataclasses import dataclass, replace

from planner.schema import Hardware, Link, SharedRate, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One GPU with host memory and drives of its own.

    Rates are the peaks of the data sheet. The two efficiencies are the shares that large kernels attain. `host_*`: pinned memory,
    each direction alone. `storage_*`: all drives of the GPU together, directly to and from device memory. `bus_*`: host memory
    and drives together over the GPU's bus, each direction alone.
    `host_update_elements_per_second`: AdamW on the host's processor, with the copy of the result.
    """

    name: str
    peak_flops_per_second: float
    peak_device_bytes_per_second: float
    device_memory_bytes: int
    arithmetic_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    host_memory_bytes: int = 128 << 30
    host_bytes_per_second: float = 50e9
    host_latency_seconds: float = 10e-6
    storage_bytes: int = 8_000_000_000_000
    storage_write_bytes_per_second: float = 24e9
    storage_read_bytes_per_second: float = 26e9
    storage_latency_seconds: float = 100e-6
    bus_bytes_per_second: float = 55e9
    host_update_elements_per_second: float = 1.5e9

    @property
    def flops_per_second(self) -> float:
        """FLOPs per second that matrix products attain."""
        return self.peak_flops_per_second * self.arithmetic_efficiency

    @property
    def device_bytes_per_second(self) -> float:
        """Bytes per second that kernels bound by memory attain."""
        return self.peak_device_bytes_per_second * self.memory_efficiency

    def hardware(self) -> Hardware:
        """Return the machine as a trace describes it."""
        host, storage = self.host_latency_seconds, self.storage_latency_seconds
        return Hardware(
            name=self.name,
            device_memory_bytes=self.device_memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            storage_bytes=self.storage_bytes,
            links=(
                _link("device", "host", self.host_bytes_per_second, host),
                _link("host", "device", self.host_bytes_per_second, host),
                _link("device", "storage", self.storage_write_bytes_per_second, storage),
                _link("storage", "device", self.storage_read_bytes_per_second, storage),
            ),
            shared=tuple(
                SharedRate(
                    name=f"bus {way}",
                    links=(way.replace("*", "host"), way.replace("*", "storage")),
                    bytes_per_second=self.bus_bytes_per_second,
                )
                for way in ("device->*", "*->device")
            ),
            host_update_elements_per_second=self.host_update_elements_per_second,
        )


def _link(from_tier: Tier, to_tier: Tier, rate: float, latency_seconds: float) -> Link:
    return Link.model_validate({"from": from_tier, "to": to_tier, "bytes_per_second": rate, "latency_seconds": latency_seconds})


H100_NVL = Machine(
    name="H100 NVL 94 GB, fp32",
    peak_flops_per_second=60e12,
    peak_device_bytes_per_second=3.9e12,
    device_memory_bytes=94_000_000_000,
    arithmetic_efficiency=0.8,
)
"""NVIDIA H100 data sheet: 94 GB at 3.9 TB/s; 60 TFLOP/s in plain fp32, PyTorch's default for products of fp32 matrices; PCIe 5.0
x16 with 63 GB/s each way, of which about 55 remain after packet headers, and copies from pinned memory attain about 50. Four PCIe
4.0 drives of 7.45 GB/s reading and 6.9 GB/s writing (Samsung 990 PRO data sheet), of which 0.87 is attained. That is half of the
machine of Yuan et al. (NeurIPS 2025), in which two GPUs share eight drives. Host update rate: Maurya et al. (Middleware 2024)."""

H100_NVL_TF32 = Machine(
    name="H100 NVL 94 GB, TF32",
    peak_flops_per_second=417.5e12,
    peak_device_bytes_per_second=3.9e12,
    device_memory_bytes=94_000_000_000,
)
"""The same with matrix products in TF32 (835 TFLOP/s with sparsity, half of it without): seven times the arithmetic with the same
links. So there is far less computation to hide copies behind."""

H100_BF16 = replace(H100_NVL_TF32, name="H100 NVL 94 GB, bf16", peak_flops_per_second=835e12)
"""The same with matrix products in bf16, twice as fast as in TF32."""

RTX_4090_BF16 = Machine(
    name="RTX 4090 24 GB, bf16",
    peak_flops_per_second=165e12,
    peak_device_bytes_per_second=1.008e12,
    device_memory_bytes=24_000_000_000,
    host_bytes_per_second=25e9,
    bus_bytes_per_second=27e9,
)
"""NVIDIA RTX 4090 data sheet (Ada whitepaper): 24 GB at 1,008 GB/s, 165 TFLOP/s in bf16 with fp32 sums, PCIe 4.0 x16."""

A100_80GB_TF32 = Machine(
    name="A100 SXM 80 GB, TF32",
    peak_flops_per_second=156e12,
    peak_device_bytes_per_second=2.039e12,
    device_memory_bytes=80_000_000_000,
    host_bytes_per_second=25e9,
    storage_write_bytes_per_second=12e9,
    storage_read_bytes_per_second=13e9,
    bus_bytes_per_second=27e9,
)
"""NVIDIA A100 data sheet: 80 GB at 2,039 GB/s, 156 TFLOP/s in TF32, PCIe 4.0 x16 (about 25 GB/s attained); two such drives."""

H200_BF16 = Machine(
    name="H200 141 GB, bf16",
    peak_flops_per_second=989e12,
    peak_device_bytes_per_second=4.8e12,
    device_memory_bytes=141_000_000_000,
    host_bytes_per_second=55e9,
    bus_bytes_per_second=55e9,
)
"""NVIDIA H200 data sheet: 141 GB at 4.8 TB/s, 989 TFLOP/s in bf16, PCIe 5.0 x16. The efficiencies are those of the H100."""
