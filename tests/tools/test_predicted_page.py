"""The page of predictions has the figures that were found, and its trainings are those that were published."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from examples import published
from examples.llama import SIZES, llama
from teraio.capturing import MachineDescription
from tests.docs.pages import DOCS
from tools import predicted_page
from tools.predicted_page import CASES, ROOT

FOUND = json.loads(predicted_page.RESULTS.read_text())


def test_the_tables_are_what_was_found() -> None:
    text = DOCS["predicted"].text
    assert text == predicted_page.page(text, FOUND), "run: python -m tools.predicted_page"
    assert {case.name for case in CASES} | {"in use"} == set(FOUND)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_training_and_its_machine_exist(case: predicted_page.Case) -> None:
    assert callable(getattr(published, case.name))
    MachineDescription.load(ROOT / case.hardware if "/" in case.hardware else case.hardware)
    assert set(FOUND[case.name]["plans"]) == set(case.policies)


def test_models_have_as_many_parameters_as_the_published_ones() -> None:
    """ViT-g: of timm's 1,136,479,232, without the places of 518 x 518 images, with a head of 45 classes. Qwen: without biases."""
    with torch.device("meta"):
        vit, qwen = published.ViTG(), llama(published.QWEN_7B, device="meta")
    assert sum(each.numel() for each in vit.parameters()) == 1_136_479_232 - (37**2 - 16**2) * 1536 + 45 * 1537
    assert sum(each.numel() for each in qwen.parameters()) == 7_615_616_512 - 28 * (3584 + 2 * 512)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_recipe_computes_the_loss_of_the_model(parts: int) -> None:
    torch.manual_seed(0)
    model = llama(replace(SIZES["tiny"], layers=2, checkpointed_layers=1))
    tokens, targets = torch.randint(256, (2, 2, 64)).unbind()
    with torch.compiler.set_stance("force_eager"):
        wanted = model(tokens, targets)
        torch.testing.assert_close(published.Recipe(model, parts=parts)(tokens, targets), wanted)
