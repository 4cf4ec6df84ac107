"""Generated traces of decoder-only transformers: one training iteration with roofline times.

The model is that of Llama 3 (RMSNorm, grouped-query attention with rotary embeddings and a flash kernel, SwiGLU, no
biases, no dropout), trained with fused AdamW, everything in fp32 (or in another type), one forward and one backward pass per
iteration. Forward stages are recompute groups: plans may run them again. Nothing is random: equal arguments give equal traces.

Symbols: T = batch x sequence tokens, S sequence, L layers, d width, q = heads x head width (= d here), k = key-value heads x
head width, f feed-forward width, V vocabulary; 4 bytes per element.

Stages, in this order: `embed`; per layer `attn.qkv` (norm, three projections, rotation), `attn.core` (flash attention),
`attn.out` (projection, residual sum), `mlp.up` (norm, two projections, SiLU(gate) x up), `mlp.down` (projection, residual
sum); `head` (norm, logits), `loss`; the same backward; the optimizer's `embed`, per layer `attn` and `mlp`, `head`.
That is 12 L + 8 stages.

FLOPs: a matrix of n elements takes 2 T n forward and 4 T n backward. Causal attention multiplies two matrices (scores,
values) of which half is masked out: 2 x 2 T S q / 2 = 2 T S q; its backward pass multiplies five: 5 T S q (Dao et al., 2022).
All other work is bound by memory: only its bytes count.

Bytes: those that a stage reads and writes, once each. Of the embedding's matrix, the forward pass reads T rows only. AdamW reads
4 and writes 3 elements per parameter.

Saved for the backward pass, per token: the residual stream before each norm (2 d), the normed ones (2 d), queries, keys, values
and attention output (2 q + 2 k), log-sum-exp (heads), gate, up and their product (3 f); at the end the last residual (d), its
normed one (d) and the log probabilities (V). The statistics of norms are recomputed, which takes one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.iteration import ELEMENT_BYTES, Draft, Matrix, Recorder, Work
from benchmarks.machines import H100_NVL, Machine
from planner.schema import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a decoder-only transformer. `tied`: the head shares the matrix of the embedding.

    `loss_tokens`: the loss is computed for so many tokens at a time, as in `examples.llama`; None for all at once. Then logits
    are saved in place of log probabilities, and of their gradient one part exists at a time.
    """

    name: str
    layers: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int
    tied: bool = False
    loss_tokens: int | None = None

    @property
    def key_value_width(self) -> int:
        """k: elements of a token's keys (as many of its values)."""
        return self.width // self.heads * self.key_value_heads


LLAMA_3_8B = Model(name="Llama-3-8B", layers=32, width=4096, heads=32, key_value_heads=8, feed_forward=14336, vocabulary=128256)
"""8.03e9 parameters; Llama Team, The Llama 3 Herd of Models (2024), table 3."""
LLAMA_3_70B = Model(name="Llama-3-70B", layers=80, width=8192, heads=64, key_value_heads=8, feed_forward=28672, vocabulary=128256)
"""70.6e9 parameters; same source."""
GRANITE_8B = Model(
    name="Granite-8B",
    layers=36,
    width=4096,
    heads=32,
    key_value_heads=8,
    feed_forward=14336,
    vocabulary=49152,
    tied=True,
)
"""8.05e9 parameters; Mishra et al., Granite Code Models (2024). Its biases (0.01 % of it) are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model with `batch` sequences of `sequence` tokens per iteration. All elements have `element_bytes`, states too."""

    model: Model
    batch: int
    sequence: int
    element_bytes: int = ELEMENT_BYTES

    def work(self) -> Work:
        """Return the iteration without a machine. Sizes are not checked: they must be positive; heads must divide the width."""
        iteration = _Iteration(self.model, batch=self.batch, sequence=self.sequence, element_bytes=self.element_bytes)
        iteration.run()
        return iteration.work(f"{self.model.name}, {self.batch} x {self.sequence} tokens")

    def trace(self, machine: Machine = H100_NVL) -> Trace:
        """Return the iteration on `machine`, with the times of `Work.trace`."""
        return self.work().trace(machine)


WORKLOADS = {
    "Llama-3-8B": Workload(model=LLAMA_3_8B, batch=4, sequence=2048),
    "Granite-8B": Workload(model=GRANITE_8B, batch=12, sequence=2048),
    "Llama-3-70B": Workload(model=LLAMA_3_70B, batch=2, sequence=2048),
}
"""The models of Yuan et al. (Cost-Efficient LLM Training with Lifetime-Aware Tensor Offloading via GPUDirect Storage, NeurIPS
2025). The number of tokens brings each peak near that of the paper: 188-191 %, 379-387 % and 940-1243 % of a 94 GB GPU. Here it
is 189 %, 376 % and 1201 %."""


@dataclass(slots=True, eq=False)
class _Layer:
    """The parameters of one layer, and the activations that its forward pass saves."""

    name: str
    attention: dict[str, Matrix]
    feed_forward: dict[str, Matrix]
    saved: dict[str, Draft] = field(default_factory=dict)


class _Iteration(Recorder):
    """Goes through the iteration in order and records its stages and their blocks."""

    def __init__(self, model: Model, *, batch: int, sequence: int, element_bytes: int) -> None:
        super().__init__(tokens=batch * sequence, element_bytes=element_bytes)
        self.model, self.sequence = model, sequence
        self.embedding = self.matrix("embed.weight", model.vocabulary, model.width)
        self.layers = [self._layer(f"layers.{index}") for index in range(model.layers)]
        self.last_norm = self.matrix("head.norm", model.width)
        self.head = self.embedding if model.tied else self.matrix("head.weight", model.vocabulary, model.width)

    def run(self) -> None:
        """Record forward, backward and update, in the order of the module's docstring."""
        residual = self._saved("embed.out", self.model.width)
        looked_up = 2 * residual.size_bytes
        self.stage("embed", "forward", (self.embedding.weight,), (residual,), traffic_bytes=looked_up)
        for layer in self.layers:
            residual = self._feed_forward(layer, self._attention(layer, residual))
        gradient = self._loss(residual)
        for layer in reversed(self.layers):
            gradient = self._attention_backward(layer, self._feed_forward_backward(layer, gradient))
        added_to = (self.embedding.gradient,) if self.model.tied else ()
        self.stage("embed", "backward", (gradient, *added_to), (self.embedding.gradient,))
        self.optimizer("embed", (self.embedding,))
        for layer in self.layers:
            self.optimizer(f"{layer.name}.attn", layer.attention.values())
            self.optimizer(f"{layer.name}.mlp", layer.feed_forward.values())
        self.optimizer("head", (self.last_norm, self.head)[: 1 if self.model.tied else 2])

    def _attention(self, layer: _Layer, residual: Draft) -> Draft:
        """Record the forward pass of attention in a layer. Return the residual stream after it."""
        d, k, heads = self.model.width, self.model.key_value_width, self.model.heads
        weight = {name: matrix.weight for name, matrix in layer.attention.items()}
        kept = layer.saved
        kept["attn.in"] = residual
        for name, width in (("attn.normed", d), ("q", d), ("k", k), ("v", k), ("attn.context", d), ("attn.lse", heads)):
            kept[name] = self._saved(f"{layer.name}.{name}", width)
        kept["mlp.in"] = self._saved(f"{layer.name}.attn.out", d)
        projections = [weight[name] for name in ("attn.norm", "wq", "wk", "wv")]
        self.matrix_stage(f"{layer.name}.attn.qkv", (residual, *projections), _pick(kept, "attn.normed q k v"))
        flops = 2.0 * self.tokens * self.sequence * d
        self.stage(f"{layer.name}.attn.core", "forward", _pick(kept, "q k v"), _pick(kept, "attn.context attn.lse"), flops=flops)
        self.matrix_stage(f"{layer.name}.attn.out", (*_pick(kept, "attn.context attn.in"), weight["wo"]), (kept["mlp.in"],))
        return kept["mlp.in"]

    def _feed_forward(self, layer: _Layer, residual: Draft) -> Draft:
        """Record the forward pass of the feed-forward part of a layer. Return the residual stream after it."""
        d, f = self.model.width, self.model.feed_forward
        weight = {name: matrix.weight for name, matrix in layer.feed_forward.items()}
        kept = layer.saved
        for name, width in (("mlp.normed", d), ("gate", f), ("up", f), ("product", f)):
            kept[name] = self._saved(f"{layer.name}.{name}", width)
        out = self._saved(f"{layer.name}.out", d)
        projections = [weight[name] for name in ("mlp.norm", "w_gate", "w_up")]
        self.matrix_stage(f"{layer.name}.mlp.up", (residual, *projections), _pick(kept, "mlp.normed gate up product"))
        self.matrix_stage(f"{layer.name}.mlp.down", (kept["product"], residual, weight["w_down"]), (out,))
        return out

    def _loss(self, residual: Draft) -> Draft:
        """Record head and loss, forward and backward. Return the gradient of the last residual stream."""
        d, vocabulary = self.model.width, self.model.vocabulary
        norm, head = self.last_norm, self.head
        normed = self._saved("head.normed", d)
        logits = self._saved("head.logits", vocabulary)
        part = self.model.loss_tokens
        if part is not None:
            self.matrix_stage("head", (residual, norm.weight, head.weight), (normed, logits))
            self.stage("loss", "forward", (logits,), ())
            gradient = self._saved("head.in.grad", d)
            self.matrix_stage(
                "head",
                (logits, normed, residual, norm.weight, head.weight),
                (head.gradient, norm.gradient, gradient),
                backward=True,
                workspace_elements=d + vocabulary * part // self.tokens,
            )
            return gradient
        log_probabilities = self._saved("loss.log_probabilities", vocabulary)
        self.matrix_stage("head", (residual, norm.weight, head.weight), (normed, logits))
        self.stage("loss", "forward", (logits,), (log_probabilities,))
        logits_gradient = self._saved("head.logits.grad", vocabulary)
        self.stage("loss", "backward", (log_probabilities,), (logits_gradient,))
        gradient = self._saved("head.in.grad", d)
        self.matrix_stage(
            "head",
            (logits_gradient, normed, residual, norm.weight, head.weight),
            (head.gradient, norm.gradient, gradient),
            backward=True,
            workspace_elements=d,
        )
        return gradient

    def _feed_forward_backward(self, layer: _Layer, gradient: Draft) -> Draft:
        """Record the backward pass. Workspace of `mlp.up`: the gradients of gate and up (2 f) and of the normed stream (d)."""
        d, f = self.model.width, self.model.feed_forward
        matrices, kept = layer.feed_forward, layer.saved
        product_gradient = self._saved(f"{layer.name}.product.grad", f)
        self.matrix_stage(
            f"{layer.name}.mlp.down",
            (gradient, kept["product"], matrices["w_down"].weight),
            (matrices["w_down"].gradient, product_gradient),
            backward=True,
        )
        into = [matrices[name] for name in ("mlp.norm", "w_gate", "w_up")]
        out = self._saved(f"{layer.name}.attn.out.grad", d)
        self.matrix_stage(
            f"{layer.name}.mlp.up",
            (gradient, product_gradient, *_pick(kept, "gate up mlp.normed mlp.in"), *(each.weight for each in into)),
            (*(each.gradient for each in into), out),
            backward=True,
            workspace_elements=2 * f + d,
        )
        return out

    def _attention_backward(self, layer: _Layer, gradient: Draft) -> Draft:
        """Record the backward pass. Workspace of `attn.core`: gradients of keys and values for each query head."""
        d, k = self.model.width, self.model.key_value_width
        matrices, kept = layer.attention, layer.saved
        context_gradient = self._saved(f"{layer.name}.attn.context.grad", d)
        self.matrix_stage(
            f"{layer.name}.attn.out",
            (gradient, kept["attn.context"], matrices["wo"].weight),
            (matrices["wo"].gradient, context_gradient),
            backward=True,
        )
        inner = tuple(self._saved(f"{layer.name}.{name}.grad", width) for name, width in (("q", d), ("k", k), ("v", k)))
        self.stage(
            f"{layer.name}.attn.core",
            "backward",
            (context_gradient, *_pick(kept, "q k v attn.context attn.lse")),
            inner,
            flops=5.0 * self.tokens * self.sequence * d,
            workspace_bytes=2 * d * self.tokens * self.element_bytes,
        )
        into = [matrices[name] for name in ("attn.norm", "wq", "wk", "wv")]
        out = self._saved(f"{layer.name}.in.grad", d)
        self.matrix_stage(
            f"{layer.name}.attn.qkv",
            (gradient, *inner, *_pick(kept, "attn.normed attn.in"), *(each.weight for each in into)),
            (*(each.gradient for each in into), out),
            backward=True,
            workspace_elements=d,
        )
        return out

    def _layer(self, name: str) -> _Layer:
        d, k, f = self.model.width, self.model.key_value_width, self.model.feed_forward
        attention = {"attn.norm": (d,), "wq": (d, d), "wk": (k, d), "wv": (k, d), "wo": (d, d)}
        feed_forward = {"mlp.norm": (d,), "w_gate": (f, d), "w_up": (f, d), "w_down": (d, f)}
        return _Layer(
            name=name,
            attention={part: self.matrix(f"{name}.{part}", *shape) for part, shape in attention.items()},
            feed_forward={part: self.matrix(f"{name}.{part}", *shape) for part, shape in feed_forward.items()},
        )

    def _saved(self, name: str, width: int) -> Draft:
        return self.block(name, "activation", width * self.tokens * self.element_bytes)


def _pick(drafts: dict[str, Draft], names: str) -> tuple[Draft, ...]:
    return tuple(drafts[name] for name in names.split())
