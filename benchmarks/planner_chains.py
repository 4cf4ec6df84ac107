"""Chains of about a hundred stages with recomputation and slow links: how far their plans are above the bound."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.iteration import Draft, Recorder
from benchmarks.machines import H100_BF16
from benchmarks.results import Figure
from benchmarks.transformer_trace import LLAMA_3_8B, Model
from benchmarks.turns import Scale
from benchmarks.variants import with_device_updates, with_one_tier
from planner import Budgets, Trace, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A Llama as one stage and one recompute group for each layer, in bf16, with host memory alone below the device.

    `outputs_too`: groups make what the next layer reads, too; otherwise only what the layer's own backward pass reads.
    """

    batch: int
    sequence: int
    device_bytes: float
    bytes_per_second: float
    outputs_too: bool

    @property
    def name(self) -> str:
        """The chain in words."""
        more = ", with outputs" * self.outputs_too
        budget, rate = self.device_bytes / 1e9, self.bytes_per_second / 1e9
        return f"{self.batch} x {self.sequence:,}, {budget:.0f} GB, {rate:.0f} GB/s{more}"

    def trace(self) -> Trace:
        """Return the iteration; updates may run on the host."""
        whole = with_one_tier(_recorded(LLAMA_3_8B, self.batch, self.sequence), "host", self.bytes_per_second)
        if self.outputs_too:
            return whole
        groups = []
        for group in whole.recompute:
            *kept, output = group.blocks
            room = group.workspace_bytes + whole.blocks[output].size_bytes  # a re-run makes the output, too, and drops it
            groups.append(group.model_copy(update={"blocks": tuple(kept), "workspace_bytes": room}))
        return whole.rebuilt(recompute=tuple(groups))


SIZES = ((16, 2048, 40e9, 25e9), (8, 4096, 30e9, 50e9))
CHAINS = tuple(
    Chain(batch=batch, sequence=sequence, device_bytes=size, bytes_per_second=rate, outputs_too=outputs)
    for outputs in (False, True)
    for batch, sequence, size, rate in SIZES
)


def _recorded(model: Model, batch: int, sequence: int) -> Trace:
    """One stage a layer and pass. A layer keeps 13 blocks of its width or wider for its backward pass, as one block."""
    record = Recorder(tokens=batch * sequence, element_bytes=2)
    tokens, width, inner, narrow = record.tokens, model.width, model.feed_forward, model.key_value_width
    elements = 2 * width * width + 2 * narrow * width + 3 * inner * width + 2 * width
    layers = [record.matrix(f"layers.{number}", elements) for number in range(model.layers)]
    head = record.matrix("head", model.vocabulary * width + width)

    def activation(name: str, elements: int) -> Draft:
        return record.block(name, "activation", 2 * elements * tokens)

    into, kept = activation("embedding", width), []
    for number, layer in enumerate(layers):
        saved = activation(f"layers.{number}.saved", 5 * width + 2 * narrow + 3 * inner)
        output = activation(f"layers.{number}.output", width)
        reads = (into, layer.weight) if number else (layer.weight,)
        writes = (saved, output) if number else (into, saved, output)
        flops = 2.0 * tokens * (elements + sequence * width)
        record.stage(f"layers.{number}", "forward", reads, writes, flops=flops, workspace_bytes=1 << 25)
        kept.append((into, saved))
        into = output
    gradient = activation("head.gradient", width)
    flops, room = 6.0 * tokens * model.vocabulary * width, tokens * model.vocabulary // 4  # logits of an eighth of the tokens
    record.stage("head", "backward", (into, head.weight), (head.gradient, gradient), flops=flops, workspace_bytes=room)
    for number, layer in reversed([*enumerate(layers)]):
        further = [activation(f"layers.{number}.gradient", width)] if number else []
        flops, room = tokens * (4.0 * elements + 5.0 * sequence * width), 4 * tokens * (inner + width)
        used = (gradient, *kept[number], layer.weight)
        record.stage(f"layers.{number}", "backward", used, (layer.gradient, *further), flops=flops, workspace_bytes=room)
        gradient = further[0] if further else gradient
    for number, layer in enumerate(layers):
        record.optimizer(f"layers.{number}", (layer,))
    record.optimizer("head", (head,))
    return record.work(f"{model.name} as a chain, {batch} x {sequence}").trace(H100_BF16)


def measure(scale: Scale) -> tuple[tuple[Figure, ...], dict[str, list[float]]]:
    """Return the plan over the bound and, by chain and place of updates, plan, bound and planning (all in seconds; CPU).

    Takes a few minutes; `scale` changes nothing.
    """
    samples: dict[str, list[float]] = {}
    for chain in CHAINS:
        for where, trace in (("device", with_device_updates(chain.trace())), ("device or host", chain.trace())):
            began = time.process_time()
            made = plan(trace, Budgets(device_bytes=int(chain.device_bytes)), threads=1).replayed
            found = [made.iteration_seconds, made.lower_bound_seconds, time.process_time() - began]
            samples[f"{chain.name} | updates on {where}"] = found
            print(f"  {chain.name}, updates on {where}: {found}", file=sys.stderr, flush=True)
    return tuple(_figures(samples)), samples


def _figures(samples: dict[str, list[float]]) -> Iterator[Figure]:
    for name, (seconds, bound, planning) in samples.items():
        note = f"{seconds:.3f} s, bound {bound:.3f} s, planned in {planning:.1f} s"
        yield Figure(name=name, value=seconds / bound, unit="x", note=note, aim="<= 1.02")
