"""What runs in tiles of its rows: by rules that hold for every operator, and with the results of graphs that are whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor import config
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import planner
from teraio.stages import StageCompiler, operators, rows, tiles

from ...thoroughness import every_other
from .graphs import FINE, Captured, capture

# -- the rules: parts of an operator's work are the whole


def head(reduction: int, cap: float = 0.0) -> Callable[..., Any]:
    """Loss and gradients of a head over [rows, width]."""

    def function(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Any:
        scores = torch.addmm(bias, x, weight.t())
        if cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.view(1, *scores.shape).double().flatten(0, 1)
        log = torch.log_softmax(scores, 1)
        loss, total = torch.ops.aten.nll_loss_forward(log, target, None, reduction, -100)
        gradient = torch.ops.aten.nll_loss_backward(torch.ones_like(loss), log, target, None, reduction, -100, total)
        gradient = torch.ops.aten._log_softmax_backward_data(gradient, log, 1, scores.dtype).float()
        return loss, gradient @ weight, gradient.t() @ x, gradient.sum(0), gradient.sum([0], keepdim=True)

    return function


def decomposed(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Any:
    """The same by the operators that Inductor gets, and others of their kinds."""
    scores = (x @ weight.t()).unsqueeze(0).transpose(0, 1).squeeze(1)
    largest = scores.amax([1], keepdim=True)
    log = (scores - largest) - (scores - largest).exp().sum(1, keepdim=True).log()
    column = target.unsqueeze(1)
    picked = log.gather(1, column).squeeze(1)
    mask = column.expand(scores.shape) == torch.arange(scores.shape[1])
    one_hot = torch.full_like(scores, 0.0).scatter(1, column, 1.0)
    padded = functional.pad(scores, [0, 3])[:, 1:]
    wide = torch.full(scores.shape, 2.0) * torch.where(mask, -1.0, 0.0) + one_hot
    return (
        picked,
        wide,
        padded.permute(1, 0),
        scores.logsumexp(1),
        scores.mean(0),
        scores.argmax(1),
        scores.softmax(0),
        scores.sum(),
    )


def batched(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Any:
    """Rows in two dimensions, and tensors that are the same for all rows or for some."""
    x = torch.stack([x, x + 1])
    scores = (x.view(-1, x.shape[2]) @ weight.t()).view(*x.shape[:2], -1)
    shifted = scores + bias + bias.view(1, 1, -1) + target.view(1, -1, 1) + x[:, :, :1]
    return (shifted, shifted.sum([0, 1]), shifted.sum([0, 1], keepdim=True), shifted.permute(2, 0, 1), shifted.sum(1))


def others(x: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Any:
    """What a head has seldom, and feed-forward layers have: gates in one product, norms within a row."""
    scores = x @ weight.t()
    classes, column, both = scores.shape[1], target.unsqueeze(1), torch.cat([scores, scores.tanh()], 1)
    copies = [torch.ops.aten.detach(scores), torch.ops.aten.alias(scores), scores.clone(), scores.double()]
    return (
        both.split([1, 2 * classes - 1], 1),
        both.split(classes, 1),
        torch.ops.aten.glu_backward(functional.glu(both, 1), both, 1),
        torch.var_mean(both, [1], correction=0, keepdim=True),
        [torch.ops.aten._unsafe_view(scores, [1, *scores.shape]), torch.t(scores), scores.cumsum(1)],
        scores.scatter_add(1, column, column.float()) + torch.slice_scatter(both, scores, 1, 1, classes + 1)[:, :classes],
        [scores.mean(1), scores.prod(1), scores.amin(1), scores.argmin(1), (scores > 0).any(1), (scores > 0).all(1)],
        torch.ops.aten._softmax_backward_data(scores, scores.softmax(1), 1, scores.dtype),
        [scores * torch.zeros(scores.shape), scores * torch.ones(scores.shape), scores * torch.full(scores.shape, 0.5)],
        [torch.zeros_like(scores), torch.ones_like(scores), torch.full_like(scores, 0.5), *copies],
        torch.ops.prims.convert_element_type(scores, torch.float64),
    )


class Values(Interpreter):
    """Runs a graph and keeps what each of its nodes returns."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def check_rules(graph: GraphModule, arguments: list[Tensor], batches: int, size: int) -> set[str]:
    """Compute each operator that has a rule in parts of `size` rows, wherever the rows can lie in its result.

    batches: how many times as many rows as the first argument has. Returns the operators that had one.
    """
    run = Values(graph)
    run.run(*arguments)
    found = set()
    first = next(iter(graph.graph.nodes))
    count = rows.product_of([batches, *(rows.shape_of(first) or ())[:1]])
    number = batches * arguments[0].shape[0]
    borders = [(begin, min(begin + size, number)) for begin in range(0, number, size)]
    inputs = zip(graph.graph.find_nodes(op="placeholder"), arguments, strict=True)
    symbols = {
        symbolic: actual
        for node, value in inputs
        for symbolic, actual in zip(rows.shape_of(node) or (), value.shape, strict=True)
        if isinstance(symbolic, sympy.Symbol)
    }
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        shape = rows.shape_of(node)
        for out in (None, *(rows.places(shape, count) if shape is not None else ())):
            known = {}
            if out is None and operators.packet_name(node) == "sum":  # it is a sum over rows where they are known to lie
                source = node.all_input_nodes[0]
                known = dict.fromkeys([source], next(rows.places(rows.shape_of(source) or (), count), rows.Rows(0)))
            part = rows.part_of(node, out, count, known)
            if part is not None:
                found.add(operators.packet_name(node))
                check(node, part, out, run.values, borders, symbols)
    return found


def check(
    node: Node,
    part: rows.Part,
    out: rows.Rows | None,
    values: dict[Node, Any],
    borders: list[tuple[int, int]],
    symbols: dict[sympy.Symbol, int],
) -> None:
    parts = []
    for begin, end in borders:

        def of_part(leaf: Any, begin: int = begin, end: int = end) -> Any:
            if isinstance(leaf, sympy.Expr):
                return int(leaf.xreplace(symbols))
            if not isinstance(leaf, Node):
                return end - begin if leaf is rows.ROWS else leaf
            there = part.inputs.get(leaf)
            if there is None:
                return values[leaf]
            flat = values[leaf].reshape(there.sizes(values[leaf].shape, borders[-1][1]))
            return flat.narrow(there.first, begin, end - begin)

        args, kwargs = torch.fx.node.map_aggregate((part.args, dict(part.kwargs)), of_part)
        parts.append(part.target(*args, **kwargs))
    whole = values[node]
    if out is not None:
        for found, wanted in zip(zip(*parts, strict=True), whole, strict=True) if rows.has_several(node) else [(parts, whole)]:
            assert_equal(torch.cat(found, out.first).reshape(wanted.shape), wanted, node)
    elif isinstance(whole, tuple):  # losses and weights
        sums = [sum(each[i].sum() for each in parts) for i in (0, 1)]
        losses = torch.cat([each[0] for each in parts]) if node.args[3] == rows.NO_REDUCTION else sums[0]
        assert_equal(losses / sums[1] if node.args[3] == rows.MEAN else losses, whole[0], node)
    else:
        assert_equal(sum(parts).reshape(whole.shape), whole, node)


def assert_equal(found: Tensor, wanted: Tensor, node: Node) -> None:
    assert found.dtype == wanted.dtype, node
    torch.testing.assert_close(found, wanted, equal_nan=True, msg=lambda text: f"{node.format_node()}: {text}")


HEADS = [head(rows.MEAN), head(rows.SUM, 2.0), head(rows.NO_REDUCTION), decomposed, batched, others]
heads = st.sampled_from(HEADS)
sizes = st.tuples(st.integers(2, 6), st.integers(1, 6), st.integers(2, 6), st.integers(1, 4), st.integers(0, 1 << 30))


def check_parts(function: Callable[..., Any], tracing: str, count: int, width: int, classes: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    target = torch.randint(0, classes, (count,))
    arguments = [torch.randn(count, width), torch.randn(classes, width), torch.randn(classes), target]
    graph = make_fx(function, tracing_mode=tracing)(*arguments)
    check_rules(graph, arguments, 2 if function is batched else 1, size)


@given(heads, sizes)
def test_parts_of_rows_are_the_whole(function: Callable[..., Any], given_sizes: tuple[int, ...]) -> None:
    """Also where numbers of rows, columns and classes happen to be equal."""
    check_parts(function, "fake", *given_sizes)


@settings(max_examples=8)
@given(heads, sizes)
def test_parts_of_a_symbolic_number_of_rows_are_the_whole(function: Callable[..., Any], given_sizes: tuple[int, ...]) -> None:
    check_parts(function, "symbolic", *given_sizes)


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_every_rule_is_among_those_that_are_compared(tracing: str) -> None:
    found = set()
    for function in HEADS:
        arguments = [torch.randn(11, 3), torch.randn(7, 3), torch.randn(7), torch.randint(0, 7, (11,))]
        graph = make_fx(function, tracing_mode=tracing)(*arguments)
        found |= check_rules(graph, arguments, 2 if function is batched else 1, 4)
    missing = (rows._RULES.keys() | rows._POINTWISE) - found
    assert not missing, missing


def test_what_would_mix_rows_has_no_part() -> None:
    def mixed(x: Tensor) -> Any:
        y = torch.relu(x)
        return (
            y.softmax(0),
            y.cumsum(0),
            y.flip(0),
            y.sort(0)[0],
            torch.native_dropout(y, 0.5, True)[0],
            y.view(3, 8),
            y.mean(0),
            y.amax(0),
            functional.pad(y, [0, 0, 1, -1]),
            y.view(torch.int32),
            y.gather(0, torch.zeros(1, 4, dtype=torch.long)),
        )

    x = torch.randn(4, 6)
    graph = make_fx(mixed, tracing_mode="fake")(x)
    relu = next(n for n in graph.graph.nodes if operators.packet_name(n) == "relu")
    known = {relu: rows.Rows(0)}
    reached = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and relu in node.all_input_nodes:
            places = list(rows.places(rows.shape_of(node) or (), 4))
            if any(rows.part_of(node, out, 4, known) for out in (*places, None)):
                reached.add(operators.packet_name(node))
    assert not reached


# -- graphs in tiles


class Model(nn.Module):
    """A small network with a large vocabulary. `loss` takes scores [batch, words, classes] and targets."""

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Any],
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        tied: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = loss
        if tied:
            self.head.weight = self.words.weight
        self.head.requires_grad_(not frozen)
        self.to(dtype)

    def forward(self, words: Tensor) -> Any:
        return self.loss(self.head(torch.tanh(self.inner(self.words(words)))), words.roll(-1, 1))


CLASSES, WIDTH, BATCH, WORDS = 2048, 8, 2, 550


def flat_loss(scores: Tensor, targets: Tensor, **settings: Any) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), **settings)


def ignoring(scores: Tensor, targets: Tensor) -> Tensor:
    return flat_loss(scores, torch.where(targets % 3 == 0, -100, targets))


def several(scores: Tensor, targets: Tensor) -> Tensor:
    """Two losses of one head, with capped scores, in 32 bits."""
    scores = 30 * torch.tanh(scores.float() / 30)
    return flat_loss(scores, targets, label_smoothing=0.1, reduction="sum") + 1e-3 * (torch.logsumexp(scores, -1) ** 2).mean()


def weighted(scores: Tensor, targets: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, CLASSES, device=scores.device)
    return flat_loss(scores, targets, weight=weight) * 1024


def by_row(scores: Tensor, targets: Tensor) -> Tensor:
    losses = flat_loss(scores, targets, reduction="none")
    return (losses * torch.linspace(0, 1, losses.numel())).mean()


def shown(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The scores are a result, too."""
    return flat_loss(scores, targets), scores


Loss = Callable[[Tensor, Tensor], Any]
LOSSES: list[Loss] = [flat_loss, ignoring, several, weighted, by_row]


@pytest.fixture(params=[False, True], ids=["whole operators", "decomposed"])
def fuses(request: pytest.FixtureRequest) -> bool:
    """Whether graphs are made of the operators that Inductor fuses."""
    return bool(request.param)


def captured(model: nn.Module, *more: tuple[int, int], fuses: bool, batch: int = BATCH) -> list[Captured]:
    """more: further sizes of batches, if sizes are symbolic."""
    words = [torch.randint(0, CLASSES, size) for size in ((batch, WORDS), *more)]
    with tiles.marking(above_bytes=0, fuses=fuses):
        return capture(model, *words, dynamic=bool(more), decompositions=None if fuses else {})


def tiled(graph: Captured) -> tuple[GraphModule, int]:
    """The graph in tiles, and how many there are."""
    fresh = graph.fresh()
    list(tiles.tile(fresh.graph))
    numbers = {operators.tile_of(node) for node in fresh.graph.nodes} - {None}
    tiles.settle(fresh.graph)
    fresh.recompile()
    return fresh, max((number for _, number in numbers), default=-1) + 1


def check_results(graph: Captured, *, tolerance: float = 1e-5) -> int:
    """The results of the graph in tiles are those of the whole one, with the same strides. Returns the number of tiles."""
    found, count = tiled(graph)
    for arguments, wanted in zip(graph.arguments, graph.results, strict=True):
        with torch.no_grad():
            results = Interpreter(found).run(*arguments)
        for a, b in zip(results, wanted, strict=True):
            if isinstance(b, Tensor):
                assert a.stride() == b.stride() and a.dtype == b.dtype
                assert (a.double() - b.double()).abs().max() <= tolerance * (b.double().abs().max() + 1e-9)
    return count


def each_pair(losses: list[Loss], *settings: dict[str, bool]) -> pytest.MarkDecorator:
    """Each loss with each of the settings of a model, by default with two of them: by whole operators and by decomposed ones."""
    cases = [
        pytest.param(loss, given, (m + n) % 2 == 1, marks=[] if (n - m) % len(settings) < 2 else pytest.mark.long)
        for m, loss in enumerate(losses)
        for n, given in enumerate(settings)
    ]
    return pytest.mark.parametrize(("loss", "settings", "fuses"), cases)


@each_pair(LOSSES, {}, {"bias": True}, {"tied": True}, {"frozen": True})
def test_a_graph_in_tiles_has_the_results_of_the_whole(loss: Loss, settings: dict[str, bool], fuses: bool) -> None:
    torch.manual_seed(0)
    forward, backward = captured(Model(loss, **settings), fuses=fuses)
    assert check_results(forward) > 1 and check_results(backward) > 1


@pytest.mark.parametrize(
    ("loss", "settings", "fuses"),
    [(ignoring, {"tied": True}, True), (several, {"bias": True}, True), (weighted, {"tied": True, "bias": True}, False)],
)
def test_one_graph_in_tiles_serves_all_sizes(loss: Loss, settings: dict[str, bool], fuses: bool) -> None:
    """Also fewer rows than there are tiles."""
    torch.manual_seed(0)
    random = [(int(torch.randint(2, 6, ())), int(torch.randint(2, 500, ()))) for _ in range(2)]
    forward, backward = captured(Model(loss, **settings), (2, 2), *random, fuses=fuses, batch=4)
    assert len(forward.arguments) == len(backward.arguments) == 4, "the graph was compiled again"
    assert check_results(forward) > 4 and check_results(backward) > 4


@pytest.mark.parametrize("loss", [flat_loss, several])
def test_sums_over_tiles_have_32_bits(loss: Loss, fuses: bool) -> None:
    torch.manual_seed(0)
    forward, backward = captured(Model(loss, dtype=torch.bfloat16, bias=True), fuses=fuses)
    assert check_results(forward, tolerance=4e-3) > 1 and check_results(backward, tolerance=8e-3) > 1
    sums = [n for n in tiled(backward)[0].graph.nodes if operators.packet_name(n) == "add_"]
    assert sums and all(n.args[0].meta["val"].dtype == torch.float32 for n in sums)


def test_scores_that_are_a_result_are_made_once(fuses: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "teraio"):
        forward, backward = captured(Model(shown), fuses=fuses, batch=2 * BATCH)
    assert caplog.messages == ["head runs in tiles, but the model returns its result, which stays whole"]
    assert check_results(forward) > 1 and check_results(backward) > 1
    scores = 2 * BATCH * WORDS * CLASSES
    made = [operators.packet_name(n) for n in tiled(forward)[0].graph.nodes if elements_made(n) >= scores]
    assert made == ["full"] and not any(elements_made(n) >= scores for n in tiled(backward)[0].graph.nodes)


def elements_made(node: Node) -> int:
    """Numbers in storages that `node` makes."""
    value = node.meta.get("val")
    makes = node.op == "call_function" and not operators.is_view(node) and not operators.writes_first(node)
    return value.numel() if makes and isinstance(value, Tensor) else 0


class FeedForward(nn.Module):
    """Features [batch, words, width] to the same, through a layer that is much wider."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES), act
        self.down = nn.Linear(act(torch.zeros(1, CLASSES)).shape[1], WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def gated(x: Tensor) -> Tensor:
    """Gate and value in one product."""
    gate, value = x.chunk(2, -1)
    return functional.silu(gate) * value


def normed(x: Tensor) -> Tensor:
    return functional.layer_norm(functional.gelu(x), x.shape[-1:])


def rms_normed(x: Tensor) -> Tensor:
    return functional.rms_norm(functional.relu(x).square(), x.shape[-1:])


@pytest.mark.parametrize(
    ("act", "dynamic"), [(functional.gelu, False), (gated, True), (functional.glu, False), (normed, True), (rms_normed, False)]
)
def test_feed_forward_layers_run_in_tiles(act: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    """With gates, and with norms within a row, by the operators that Inductor gets."""
    torch.manual_seed(0)
    features = [torch.randn(BATCH, words, WIDTH) for words in (WORDS, 433)[: 1 + dynamic]]
    with tiles.marking(above_bytes=0, fuses=True):
        forward, backward = capture(FeedForward(act), *features, dynamic=dynamic)
    assert check_results(forward) > 1 and check_results(backward) > 1
    if not dynamic:
        made = [elements_made(n) for graph in (forward, backward) for n in tiled(graph)[0].graph.nodes]
        assert max(made) < BATCH * WORDS * CLASSES / 2


class Changing(Model):
    """Changes a buffer that scores are computed from, once they are."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(flat_loss)
        self.use = use
        self.register_buffer("shift", torch.linspace(-1, 1, CLASSES))

    def forward(self, words: Tensor) -> Any:
        scores = self.use(self.head(torch.tanh(self.inner(self.words(words)))), self.shift)
        loss = self.loss(scores, words.roll(-1, 1))
        self.shift.neg_()
        return loss


def masked(scores: Tensor, shift: Tensor) -> Tensor:
    return scores.masked_fill(shift > 0, -5.0)


@pytest.mark.parametrize(("use", "fuses"), [(torch.add, False), (masked, False), (masked, True)])
def test_what_reads_an_input_that_the_graph_changes_is_not_computed_again(use: Callable[..., Tensor], fuses: bool) -> None:
    """For the backward pass it would read what there is by then: with `add` the head runs whole, a mask is saved."""
    torch.manual_seed(0)
    eager = Changing(use)
    model = copy.deepcopy(eager)
    torch.manual_seed(1)
    forward, backward = captured(model, fuses=fuses)
    torch.manual_seed(1)
    eager(torch.randint(0, CLASSES, (BATCH, WORDS))).backward()
    for found, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    assert (check_results(forward) > 1) is (check_results(backward) > 1) is (use is masked)


def test_a_graph_without_a_backward_pass_runs_in_tiles(fuses: bool) -> None:
    """After the passes of the user."""
    words, seen = torch.randint(0, CLASSES, (BATCH, WORDS)), list[Graph]()
    with torch.no_grad(), config.patch(joint_custom_post_pass=seen.append), tiles.marking(above_bytes=0, fuses=fuses):
        (forward,) = capture(Model(flat_loss), words, decompositions=None if fuses else {}, loss=False)
    assert check_results(forward) > 1 and len(seen) == 1


def test_a_budget_that_larger_tiles_exceed_makes_them_smaller() -> None:
    """In tiles as large as what a head and its gradients take in any case it needs twice that."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(128, 1024, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).logsumexp(1)

    def count(most_bytes: int | None) -> int:
        with tiles.marking(above_bytes=0, fuses=True, most_bytes=most_bytes):
            return tiled(capture(Wide(), torch.randn(4096, 128))[1])[1]

    assert count(None) == count(1 << 30) == 8 and count(1 << 20) == 16


def test_what_no_rule_knows_ends_a_region(fuses: bool) -> None:
    """Scores are shifted by a row each: what follows runs for all rows, and what comes before in tiles."""

    def shifting(scores: Tensor, targets: Tensor) -> Tensor:
        shown = 30 * torch.tanh(scores / 30)
        return flat_loss(shown[:, :-1].contiguous(), targets[:, :-1])

    forward, backward = captured(Model(shifting), fuses=fuses)
    check_results(forward)
    check_results(backward)


@pytest.mark.parametrize(("more", "fuses"), every_other(((), False), ((), True), (((3, WORDS),), True), (((3, WORDS),), False)))
def test_equal_tiles_are_compiled_once(more: tuple[tuple[int, int], ...], fuses: bool) -> None:
    forward, backward = captured(Model(flat_loss), *more, fuses=fuses, batch=4)
    compiler = StageCompiler(codegen="eager", policy=FINE, fuses=fuses)
    made = [compiler.compile(each.fresh(), phase=each.phase, options={}) for each in (forward, backward)]
    numbered = [stage for program in made for stage in program.stages if ".tile" in stage.name and ".tile0" not in stage.name]
    assert len({id(stage.run) for stage in numbered}) < 0.7 * len(numbered), "tiles share no function"
    written = [stage for stage in numbered if stage.mutates]
    assert written and not any(stage.repeatable for stage in written)


def test_what_runs_in_tiles_is_known_with_its_cost(fuses: bool) -> None:
    """A head of 1,100 words: the backward pass makes the scores again, one product of three; without, they are there at once."""
    compiler = StageCompiler(codegen="eager", policy=FINE, fuses=fuses)
    for each in captured(Model(flat_loss), fuses=fuses):
        compiler.compile(each.fresh(), phase=each.phase, options={})
    names = ("forward/head", "backward/head", "other")
    stages = [planner.Stage(id=i, name=name, phase="user", duration_seconds=1.0) for i, name in enumerate(names)]
    hardware = planner.Hardware(name="made up", device_memory_bytes=1)
    forward, backward = compiler.tiled(planner.Trace(name="made up", hardware=hardware, stages=stages))
    assert forward.tiles == backward.tiles > 1 and forward.what.startswith("forward/") and backward.what.startswith("backward/")
    assert forward.again_seconds == 0.0 < backward.again_seconds < 1.0
    scores = 4 * BATCH * WORDS * CLASSES
    assert 2 * scores <= backward.whole_bytes < 2.2 * scores
    assert not compiler.tiled(planner.Trace(name="made up", hardware=hardware, stages=[stages[2].model_copy(update={"id": 0})]))
