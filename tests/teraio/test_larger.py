"""A model that is larger than its budget is made, loaded, looked at and trained with the bits of a plain one."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import teraio
from examples.memory import watched
from teraio.training_run import TrainingRun

from ..training import MIB, blocks, forget

BUDGET = 24 * MIB
"""Of the models here, which have 32 MiB and more."""


class Stack(nn.Module):
    """Eight layers of 4 MiB whose weights are initialised once more when all are there, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))
        self.apply(self.begin)

    @staticmethod
    def begin(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value


class Odd(nn.Module):
    """Parametrized, lazy and tied weights, a large buffer, and half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(1024, 1024))
        self.lazy = nn.LazyLinear(2048)
        self.lazy(torch.zeros(1, 1024))
        self.first, self.last = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.rand(1024, 1024))
        self.half = nn.Linear(2048, 2048).to(torch.bfloat16)


def gpt2() -> nn.Module:
    config = GPT2Config(n_layer=3, n_embd=512, n_head=8, vocab_size=4096, n_positions=64, bos_token_id=1, eos_token_id=1)
    return GPT2LMHeadModel(config)


def plain(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"memory_budget": BUDGET, "storage": folder, "codegen": "eager", **more}


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == known and torch.equal(value, wanted) for (name, value), (known, wanted) in pairs)


def check_budget() -> teraio.Status:
    (status,) = teraio.status()
    assert status.device_peak_bytes <= BUDGET < status.movable_bytes
    return status


@pytest.mark.parametrize(
    ("make", "tiers"), [(Stack, {}), (Odd, {"storage": None, "host_budget": 64 * MIB}), (gpt2, {"checksums": True})]
)
def test_models_are_made_within_the_budget(make: Callable[[], nn.Module], tiers: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    with teraio.under_budget(**options(tmp_path, **tiers)):
        model = make()
    drawn = torch.rand(1)
    check_budget()
    assert same(model, plain(make)) and torch.equal(torch.rand(1), drawn)


def test_what_numpy_writes_between_two_operators_is_seen(tmp_path: Path) -> None:
    """Also where a weight is away: in its checkpoint, or in a spill file."""
    wanted, folder = saved(tmp_path)
    with teraio.under_budget(**options(tmp_path)) as tiers:
        models = [Stack(), on_meta()]
        tiers.load(models[1], folder)
        for model in models:
            weights = [layer.weight for layer in model.layers]  # type: ignore[union-attr,attr-defined]
            for weight in weights:
                weight.detach().numpy()[3] = 7
            assert all((weight[3] == 7).all() for weight in weights)
            assert any((weight[4] != 7).all() for weight in weights)
    check_budget()
    assert torch.equal(models[1].layers[2].weight[4:], wanted.layers[2].weight[4:])  # type: ignore[union-attr,index]


def moved() -> int:
    return sum(teraio.status()[0].moved_bytes.values())


def train(model: nn.Module, steps: int = 6) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    losses = []
    torch.manual_seed(1)
    for _ in range(steps):
        loss = model(torch.rand(32, 1024)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        teraio.wait_for_plan()
    return losses


def test_a_model_that_was_made_within_the_budget_trains_by_a_plan_with_the_same_bits(tmp_path: Path, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    with teraio.under_budget(**options(tmp_path)):
        model = Stack()
    before, when_compiled, check = moved(), [], TrainingRun.check

    def checked(run: TrainingRun, programs: Any, **how: bool) -> None:
        when_compiled.append(moved())
        check(run, programs, **how)

    monkeypatch.setattr(TrainingRun, "check", checked)
    teraio.compile(model, **options(tmp_path))
    losses = train(model)
    assert check_budget().phase == "planned" and len(teraio.status()) == 1
    assert {block.name for block in blocks() if block.kind == "parameter"} >= {f"layers.{n}.weight" for n in range(8)}
    assert when_compiled and set(when_compiled) == {before}  # nothing is brought in to compile
    twin = plain(Stack)
    assert losses == train(twin) and same(model, twin)


def test_gradients_are_clipped_within_the_budget(tmp_path: Path) -> None:
    """PyTorch computes their norms, and scales them, by one operator each over the list of all, which does not fit."""
    model, twin = teraio.compile(plain(Stack), **options(tmp_path)), plain(Stack)
    norms = []
    for each in (model, twin):
        optimizer = torch.optim.AdamW(each.parameters())
        for step in range(2):
            torch.manual_seed(step)
            each(torch.randn(64, 1024)).square().mean().backward()
            with teraio.under_budget(**options(tmp_path)):
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 1e-3).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms[:2] == norms[2:] and min(norms) > 1e-3 and same(model, twin)
    check_budget()


# -- checkpoints


def saved(folder: Path, files: int = 3) -> tuple[nn.Module, Path]:
    """Save a model in several files with an index."""
    model, folder = plain(Stack), folder / "checkpoint"
    folder.mkdir()
    state = list(model.state_dict().items())
    where = {}
    for number in range(files):
        part = dict(state[number::files])
        safetensors.torch.save_file(part, folder / f"part-{number}.safetensors")
        where |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return model, folder


def frozen(model: nn.Module) -> nn.Module:
    """All but the last layer, as of LoRA."""
    for layer in model.layers[:-1]:  # type: ignore[index,union-attr]
        layer.requires_grad_(False)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Stack()


@pytest.mark.parametrize("make", [on_meta, Stack])
def test_a_checkpoint_is_loaded_within_the_budget_and_trains(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    wanted, folder = saved(tmp_path)
    header(folder, lambda described: described.setdefault("__metadata__", {"by": "a writer that does not align"}))
    with teraio.under_budget(**options(tmp_path)) as tiers:
        model = make()
        tiers.load(model, folder)
    status = check_budget()
    assert same(model, wanted)
    if make is on_meta:  # the files are the first copies
        assert status.moved_bytes == {"device->storage": 0, "storage->device": 0}
    teraio.compile(model, **options(tmp_path))
    assert train(model) == train(wanted) and same(model, wanted)
    check_budget()


def test_frozen_weights_stay_in_their_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the model is compiled with other options than it was loaded under, and in a second start, by the same plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wanted, folder = saved(tmp_path)

    def loaded(**more: Any) -> nn.Module:
        with teraio.under_budget(**options(tmp_path, **more)) as tiers:
            model = on_meta()
            tiers.load(model, folder)
        return frozen(model)

    written = sum(path.stat().st_size for path in folder.iterdir())
    model = teraio.compile(loaded(memory_budget=BUDGET + MIB), **options(tmp_path, plan_cache="read-write"))
    expected = train(frozen(wanted), 4)
    assert train(model, 6)[:4] == expected
    status = check_budget()
    base = [block for block in blocks() if block.kind == "parameter" and block.name.startswith("layers.0")]
    assert base and status.moved_bytes["storage->device"] > 7 * 4 * MIB and status.phase == "planned"
    assert sum(path.stat().st_size for path in folder.iterdir()) == written
    del model, base
    forget()
    model = teraio.compile(loaded(plan_cache="read-write"), **options(tmp_path, plan_cache="read-write"))
    assert train(model, 2) == expected[:2] and check_budget().phase == "planned"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_pretrained_takes_files_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    wanted = plain(gpt2).to(dtype)
    wanted.save_pretrained(tmp_path / "saved", max_shard_size="8MB")  # type: ignore[operator]
    with teraio.under_budget(**options(tmp_path, memory_budget=BUDGET // 2)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype)
    (status,) = teraio.status()
    assert status.device_peak_bytes <= BUDGET // 2
    assert same(model, wanted) and model.lm_head.weight is model.transformer.wte.weight
    assert status.moved_bytes["device->storage"] == 0


def test_tied_weights_are_loaded_by_either_name_and_a_changed_mapping_is_copied(tmp_path: Path) -> None:
    weights = {"last.weight": torch.rand(1024, 1024), "other": torch.rand(1024, 1025)}
    file, made_before = tmp_path / "model.safetensors", weights["other"].clone()
    safetensors.torch.save_file(weights, file)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)
            self.last.weight = self.first.weight
            self.other = nn.Parameter(torch.empty(1024, 1025))

    with teraio.under_budget(**options(tmp_path)) as tiers:
        with torch.device("meta"):
            model = Tied()
        tiers.load(model, file)
        changed = safetensors.torch.load_file(file)["other"]
        changed[3] = 7
        model.changed = nn.Parameter(changed)
        model.given = nn.Parameter(made_before)
    assert model.first.weight is model.last.weight and torch.equal(model.first.weight, weights["last.weight"])
    assert torch.equal(model.other, weights["other"]) and torch.equal(model.given, weights["other"])
    assert [block.size_bytes for block in blocks()].count(made_before.nbytes) == 3, "all of them can move"
    assert model.changed[3, 0] == 7 and torch.equal(model.changed[4:], weights["other"][4:])


def header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a file."""
    file = folder / "part-1.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    described = json.loads(content[8 : 8 + length])
    change(described)
    text = json.dumps(described).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no shard": (lambda f: (f / "part-1.safetensors").unlink(), "names part-1.safetensors, which is not there"),
    "no folder": (lambda f: f.rename(f.with_name("other")), "is not there"),
    "cut": (lambda f: (f / "part-1.safetensors").write_bytes((f / "part-1.safetensors").read_bytes()[:-5]), "is cut short"),
    "no safetensors": (lambda f: (f / "part-1.safetensors").write_bytes(b"PK" * 40), "do not begin with a header"),
    "no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "is no index"),
    "shape": (lambda f: header(f, lambda h: h["layers.2.weight"].update(shape=[512, 2048])), r"shape \(512, 2048\), the model"),
    "type": (lambda f: header(f, lambda h: h["layers.2.weight"].update(dtype="I32")), "is torch.int32"),
    "name": (lambda f: header(f, lambda h: h.update(new=h["layers.2.weight"])), "has new, and the model has not"),
    "lost": (lambda f: header(f, lambda h: h.pop("layers.2.weight")), "lacks layers.2.weight"),
    "header": (lambda f: header(f, lambda h: h["layers.2.weight"].pop("dtype")), "its header cannot be read"),
    "bytes": (lambda f: header(f, lambda h: h["layers.2.weight"].update(shape=[7])), r"is damaged: .* of shape \(7,\)"),
    "other": (lambda f: [each.unlink() for each in f.iterdir() if "0" not in each.name], "has no layers.*the model needs it"),
    "two": (lambda f: (f / "model.safetensors.index.json").unlink(), "has 3 safetensors files and no"),
}


def test_a_broken_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    wanted, whole = saved(tmp_path)
    model = plain(Stack)
    for number, (spoil, said) in enumerate(BROKEN.values()):
        spoil(folder := Path(shutil.copytree(whole, tmp_path / str(number) / "checkpoint")))
        with teraio.under_budget(**options(tmp_path)) as tiers, pytest.raises(teraio.CheckpointError, match=said):
            tiers.load(model, folder)
        assert same(model, wanted), said
        shutil.rmtree(folder.parent)


@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_is_saved_and_loaded_within_the_budget(inside: bool, tmp_path: Path) -> None:
    with teraio.under_budget(**options(tmp_path)):
        model = Stack()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())  # 64 MiB of states
    optimizer.step()
    with watched() as held:
        torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
        wanted = torch.load(tmp_path / "optimizer.pt", mmap=True)
        optimizer.step()
        with teraio.under_budget(**options(tmp_path)) if inside else contextlib.nullcontext():
            optimizer.load_state_dict(wanted)
    assert held.highest - held.before < 16 * MIB, "a tensor of 4 MiB at a time, and what is no tensor"
    found = optimizer.state_dict()["state"]
    assert all(torch.equal(value, found[number][name]) for number in found for name, value in wanted["state"][number].items())
    check_budget()


def test_a_full_drive_stops_a_saver_and_nothing_else(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with teraio.under_budget(**options(tmp_path)):
        model = Stack()
    teraio.compile(model, **options(tmp_path))
    losses = train(model, 2)
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        torch.save(model.state_dict(), full)
    twin = plain(Stack)
    assert losses + train(model, 2) == train(twin, 2) + train(twin, 2) and same(model, twin)
    check_budget()


def test_what_cannot_work_says_so(tmp_path: Path) -> None:
    with pytest.raises(teraio.OptionsError, match="there is no lower tier"), teraio.under_budget():
        pass
    with teraio.under_budget(**options(tmp_path)):
        model = Stack()
        with pytest.raises(teraio.BudgetError, match="aten.empty"):
            nn.Linear(4096, 4096)
        nn.init.zeros_(model.layers[0].weight)  # type: ignore[union-attr,arg-type]
    assert not model.layers[0].weight.any() and model.layers[1].weight.all()  # type: ignore[union-attr]
