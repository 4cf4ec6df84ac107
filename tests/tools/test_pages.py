"""The pages of captured traces and of predictions have the figures that were found, and what those come from exists."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from examples import published
from examples.llama import SIZES, llama
from planner import Trace, floor
from teraio.capturing import MachineDescription
from tests.docs.pages import DOCS
from tools import captured_page, predicted_page
from tools.captured_traces import CAPTURES, PAPER

CAPTURED = json.loads(captured_page.RESULTS.read_text())
PREDICTED = json.loads(predicted_page.RESULTS.read_text())


def test_the_page_of_captured_traces_is_what_was_found() -> None:
    assert DOCS["captured"].text == captured_page.page(CAPTURED), "run: python -m tools.captured_page"


def test_every_trace_was_planned() -> None:
    assert list(CAPTURED) == [capture.name for capture in CAPTURES]
    assert sorted(path.name for path in PAPER.parent.glob("*.gz")) == sorted(capture.path.name for capture in CAPTURES)


@pytest.mark.parametrize("capture", [each for each in CAPTURES if each.hardware != PAPER], ids=lambda capture: capture.name)
def test_the_files_are_the_traces_that_were_planned(capture: captured_page.Capture) -> None:
    trace, found = Trace.load(capture.path), CAPTURED[capture.name]
    assert (trace.name, trace.fingerprint, len(trace.stages)) == (found["title"], found["fingerprint"], found["stages"])
    assert floor(trace)[0] == found["floor_bytes"]
    for plan in found["plans"].values():
        assert plan["ideal_seconds"] == pytest.approx(trace.ideal_seconds)
        assert plan["peak_bytes"]["device"] <= plan["device_bytes"]


def test_the_machine_of_the_paper() -> None:
    hardware = MachineDescription.load(PAPER).hardware
    link = hardware.link("storage", "device")
    assert link is not None and link.bytes_per_second == 4 * 6.7e9


def test_the_page_of_predictions_is_what_was_found() -> None:
    text = DOCS["predicted"].text
    assert text == predicted_page.page(text, PREDICTED), "run: python -m tools.predicted_page"
    assert {case.name for case in predicted_page.CASES} | {"in use"} == set(PREDICTED)


@pytest.mark.parametrize("case", predicted_page.CASES, ids=lambda case: case.name)
def test_each_training_and_its_machine_exist(case: predicted_page.Case) -> None:
    assert callable(getattr(published, case.name))
    MachineDescription.load(predicted_page.ROOT / case.hardware if "/" in case.hardware else case.hardware)
    assert set(PREDICTED[case.name]["plans"]) == set(case.policies)


def test_models_have_as_many_parameters_as_the_published_ones() -> None:
    """ViT-g: of timm's 1,136,479,232, without the places of 518 x 518 images, with a head of 45 classes. Qwen: without biases."""
    with torch.device("meta"):
        vit, qwen, olmoe = published.ViTG(), llama(published.QWEN_7B, device="meta"), published.with_experts(published.OLMOE_7B)
    assert sum(each.numel() for each in olmoe.parameters()) == 6_919_161_856
    assert sum(each.numel() for each in vit.parameters()) == 1_136_479_232 - (37**2 - 16**2) * 1536 + 45 * 1537
    assert sum(each.numel() for each in qwen.parameters()) == 7_615_616_512 - 28 * (3584 + 2 * 512)


def test_experts_take_the_first_rows_up_to_their_capacity() -> None:
    torch.manual_seed(0)
    layer = published.Experts(replace(published.OLMOE_7B, width=16, feed_forward=8))
    for each in layer.parameters():
        torch.nn.init.normal_(each, std=0.3)
    hidden = torch.randn(2, 32, 16)
    shares, chosen = layer.router(hidden).softmax(dim=-1).flatten(0, 1).topk(published.CHOSEN)
    wanted, left = torch.zeros(64, 16), [64 * published.CHOSEN // published.EXPERTS] * published.EXPERTS
    for token, row in enumerate(hidden.flatten(0, 1)):
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            gate, up = (row @ layer.up[expert]).chunk(2)
            wanted[token] += share * ((torch.nn.functional.silu(gate) * up) @ layer.down[expert]) * (left[expert] > 0)
            left[expert] -= 1
    assert min(left) < 0 < max(left), "some rows are left out, and some places are empty"
    torch.testing.assert_close(layer(hidden).flatten(0, 1), wanted)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_recipe_computes_the_loss_of_the_model(parts: int) -> None:
    torch.manual_seed(0)
    model = llama(replace(SIZES["tiny"], layers=2, checkpointed_layers=1))
    tokens, targets = torch.randint(256, (2, 2, 64)).unbind()
    with torch.compiler.set_stance("force_eager"):
        wanted = model(tokens, targets)
        torch.testing.assert_close(published.Recipe(model, parts=parts)(tokens, targets), wanted)
