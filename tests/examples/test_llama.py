"""The Llama: published sizes, attention and positions as defined, one copy of the weights, training as any other model."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from examples.llama import SIZES, Attention, Llama, LlamaConfig, llama, rotate, rotations
from examples.memory import give_free_memory_back, reset_peak, resident_bytes
from examples.training import Setting, Training, computing_seconds

SMALL = LlamaConfig(layers=2, width=64, heads=4, key_value_heads=2, feed_forward=96, vocabulary=256, tied=True, context=32)

PARAMETERS = {
    "tiny": 12_718_592,
    "gpt2-124m": 123_551_232,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
}
"""Those of "llama-..." are the published ones. GPT-2 has 124,439,808: biases, and 786,432 for positions."""


def parameters(model: torch.nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def rows(seed: int = 0, count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.randint(SMALL.vocabulary, (count, SMALL.context + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_the_published_parameters(name: str) -> None:
    with torch.device("meta"):
        assert parameters(Llama(SIZES[name])) == PARAMETERS[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grouped_queries_attend_as_if_each_had_its_own_key_and_value(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grouped = Attention(SMALL).to(dtype)
    full = Attention(replace(SMALL, key_value_heads=SMALL.heads)).to(dtype)
    with torch.no_grad():
        full.query.weight.copy_(grouped.query.weight)
        full.output.weight.copy_(grouped.output.weight)
        for name in ("key", "value"):
            heads = getattr(grouped, name).weight.unflatten(0, (SMALL.key_value_heads, -1))
            getattr(full, name).weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    hidden = torch.randn(2, SMALL.context, SMALL.width, dtype=dtype)
    cosine, sine = rotations(SMALL, SMALL.context, hidden.device)
    torch.testing.assert_close(grouped(hidden, cosine, sine), full(hidden, cosine, sine))


def test_rotated_products_depend_on_the_distance_only() -> None:
    cosine, sine = rotations(SMALL, SMALL.context, torch.device("cpu"))
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).unbind()
    turned = [rotate(each.expand(SMALL.context, 16), cosine, sine) for each in (query, key)]
    torch.testing.assert_close(turned[0][0], query)
    products = turned[0] @ turned[1].T
    for distance in (-9, 0, 1, 20):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(products[0, 1], products[0, 0], atol=1e-2)


def test_no_token_sees_what_follows_it() -> None:
    torch.manual_seed(0)
    model = llama(SMALL)
    tokens, targets = rows()
    early = targets.clone()
    early[:, 10:] = -100  # ignored
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % SMALL.vocabulary
    assert torch.equal(model(tokens, early), model(changed, early))
    assert not torch.equal(model(tokens, targets), model(changed, targets))


def test_a_tied_head_trains_the_embedding() -> None:
    model = llama(SMALL)
    unused = SMALL.vocabulary - 1
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    assert model.tokens.weight.grad is not None and model.tokens.weight.grad[unused].any()
    apart = llama(replace(SMALL, tied=False))
    apart(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    assert apart.tokens.weight.grad is not None and not apart.tokens.weight.grad[unused].any()
    assert parameters(apart) == parameters(model) + SMALL.vocabulary * SMALL.width


def test_a_loss_in_pieces_is_the_same_loss() -> None:
    results = []
    for loss_tokens in (1024, 20):
        torch.manual_seed(0)
        model = llama(replace(SMALL, loss_tokens=loss_tokens), dtype=torch.float64)
        loss = model(*rows())
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_checkpointed_layers_give_the_same_loss_and_gradients() -> None:
    results = []
    for checkpointed in (0, 2):
        torch.manual_seed(0)
        model = llama(replace(SMALL, checkpointed_layers=checkpointed))
        loss = model(*rows())
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bf16_gives_a_loss_in_fp32_near_that_of_fp32_weights() -> None:
    torch.manual_seed(0)
    wide = llama(SMALL)
    narrow = llama(SMALL, dtype=torch.bfloat16)
    narrow.load_state_dict(wide.state_dict())
    loss = narrow(*rows())
    assert loss.dtype is torch.float32
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    assert loss.item() == pytest.approx(wide(*rows()).item(), rel=1e-3)
    assert loss.item() != loss.bfloat16().item()


def test_weights_exist_once_while_they_are_made() -> None:
    config = replace(SMALL, width=1024, feed_forward=4096, layers=4)
    llama(SMALL, dtype=torch.bfloat16)  # what the first call loads
    give_free_memory_back()
    reset_peak()
    before = resident_bytes()["VmHWM"]
    model = llama(config, dtype=torch.bfloat16)
    size_bytes = 2 * parameters(model)
    assert size_bytes > 100 << 20
    assert resident_bytes()["VmHWM"] - before < 1.2 * size_bytes
    assert model.norm.weight.float().eq(1).all()
    assert model.layers[3].feed_forward.down.weight.float().std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_on_the_processor_changes_no_loss(dtype: str) -> None:
    losses = []
    for save_on_cpu in (False, True):
        fields = {"backend": "eager", "model": SMALL, "dtype": dtype, "save_on_cpu": save_on_cpu}
        training = Training(Setting.model_validate({**fields, "batch": 8, "learning_rate": 1e-2, "text_bytes": 100_000}))
        steps = [training.step() for _ in range(12)]
        report = training.finish()
        assert {step.tokens for step in steps} == {8 * SMALL.context}
        assert report.parameters == parameters(llama(SMALL)) and report.peak_reserved_bytes is None
        losses.append([step.loss for step in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0] - 0.5


def test_the_profiler_sees_the_device_at_work() -> None:
    training = Training(Setting(backend="eager", model=SIZES["tiny"], batch=2, text_bytes=100_000))
    assert 1e-3 < training.busy_seconds() < 60
    training.finish()


def test_computing_is_what_ran_on_the_device_but_copies() -> None:
    def event(name: str, start: float, end: float, device: str = "CUDA", annotation: bool = False) -> SimpleNamespace:
        span, kind = SimpleNamespace(start=start, end=end), SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=kind, time_range=span, is_user_annotation=annotation)

    events = [
        event("kernel", 0, 10),
        event("kernel", 5, 20),
        event("Memcpy DtoD (Device -> Device)", 30, 40),
        event("Memcpy HtoD (Pinned -> Device)", 50, 90),
        event("Memcpy DtoH (Device -> Pinned)", 50, 90),
        event("Optimizer.step#AdamW.step", 0, 100, annotation=True),
        event("aten::mm", 0, 100, device="CPU"),
    ]
    assert computing_seconds(events, "CUDA") == pytest.approx(30e-6)
    assert computing_seconds(events, "CPU") == pytest.approx(100e-6)
