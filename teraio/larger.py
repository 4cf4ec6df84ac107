"""Models that fit nowhere: within `teraio.under_budget(...)`, what makes, loads and looks at a model keeps the budget.

[Note: Tensors that are files]
safetensors maps its files, so a tensor that it returns is memory of the file. When a module takes such a tensor for a parameter,
the file becomes the first copy of a block that is away: nothing is read until the block is needed, and nothing is written until
somebody changes it. Where there is no storage tier, and where pages were changed after they were mapped, the tensor is copied to
memory that it can leave.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook

from planner.errors import CheckpointError, OptionsError, UnsupportedError
from runtime.cpu import unchanged_since_mapped
from runtime.device import MIN_MOVED_BYTES
from runtime.execution import OperatorRunner
from runtime.paging import PLAIN
from teraio.options import Options
from teraio.registry import Registry
from teraio.stages import OperatorsUnderBudget


class UnderBudget:
    """What `teraio.under_budget` gives: loads checkpoints into the tiers."""

    def __init__(self, operators: OperatorRunner) -> None:
        self._operators, self._device = operators, operators.device
        self._thread = threading.get_ident()

    def load(self, model: torch.nn.Module, path: str | PathLike[str]) -> None:
        """Load a checkpoint of safetensors files into a model.

        Parameters on the device "meta" get the device of this block, and large ones stay in their file until they are needed, see
        [Note: Tensors that are files]. Those that have memory are overwritten.

        path: a safetensors file, the index of several, or a folder with one of them. Its tensors are those of
        `model.state_dict()`; of tied ones, any will do. Raises CheckpointError before anything is loaded, if a file is missing or
        damaged, or belongs to another model; UnsupportedError if the model has been sharded.
        """
        wanted = _tensors_of(model)
        if shards := [name for name, tensor in wanted.items() if type(tensor) not in PLAIN]:
            raise UnsupportedError(
                f"load: {listed(shards)} are no plain tensors, as after fully_shard; load the whole model first, and shard it "
                "then, both within this block: no rank takes more memory than its budget for it"
            )
        saved = saved_tensors(Path(path))
        first: dict[int, str] = {}
        tied = {name: first.setdefault(id(tensor), name) for name, tensor in wanted.items()}
        check(saved, wanted, tied, Path(path))
        loaded: dict[str, Tensor] = {}
        for name, each in saved.items():
            if (original := tied[name]) not in loaded:
                loaded[original] = self._loaded(original, each, wanted[name])
        for name, tensor in wanted.items():
            if loaded[tied[name]] is not tensor:
                path_of_module, _, own_name = name.rpartition(".")
                setattr(model.get_submodule(path_of_module), own_name, loaded[tied[name]])

    def _loaded(self, name: str, saved: SavedTensor, current: Tensor) -> Tensor:
        """Return the tensor that takes the place of `current`, which is itself if it has memory."""
        if not current.is_meta:
            with torch.no_grad():
                current.copy_(_mapped(saved))
            return current
        if saved.size_bytes >= MIN_MOVED_BYTES and self._operators.pager.has_drives:
            fresh = self._operators.in_file(saved.path, saved.offset_bytes, saved.shape, saved.dtype, name)
        else:
            fresh = torch.empty(saved.shape, dtype=saved.dtype, device=self._device).copy_(_mapped(saved))
        return torch.nn.Parameter(fresh, current.requires_grad) if isinstance(current, torch.nn.Parameter) else fresh

    def registered(self, module: torch.nn.Module, name: str, tensor: Tensor | None) -> None:
        """A hook of modules: the tensor becomes a block, in the file that it lies in or in memory that it can leave."""
        if threading.get_ident() != self._thread or type(tensor) not in PLAIN or tensor is None:
            return
        if tensor.device != self._device or tensor.layout is not torch.strided or tensor.nbytes < MIN_MOVED_BYTES:
            return
        if self._operators.pager.known_block(tensor) is not None:
            return
        found = _file_behind(tensor) if self._device.type == "cpu" else None
        if found is None:
            self._operators.take_in(tensor)
            return
        with torch.no_grad():
            whole = tensor.is_contiguous() and unchanged_since_mapped(tensor.data_ptr(), tensor.nbytes)
            if whole and self._operators.pager.has_drives:
                tensor.data = self._operators.in_file(*found, tensor.shape, tensor.dtype)
            else:
                tensor.data = tensor.detach().clone()  # what a file lends cannot leave


@contextlib.contextmanager
def under_budget(registry: Registry, options: Options, device: torch.device | str | None) -> Iterator[UnderBudget]:
    """See `teraio.under_budget`."""
    place = torch.empty(0, device=device or torch.get_default_device()).device  # with its index
    operators = registry.run_for(options, place).operators
    if not operators.pager.can_move:
        registry.forget_unused()
        raise OptionsError("under_budget: there is no lower tier; give storage (directories on drives), host_budget or both")
    taking = UnderBudget(operators)
    with contextlib.ExitStack() as removing:
        removing.callback(register_module_parameter_registration_hook(taking.registered).remove)
        removing.callback(register_module_buffer_registration_hook(taking.registered).remove)
        removing.enter_context(OperatorsUnderBudget(operators))
        yield taking


def _tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `model.state_dict()` by name, tied ones several times."""
    found = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    modules = model.named_modules(remove_duplicate=False)
    left_out = {f"{path}.{name}".lstrip(".") for path, module in modules for name in module._non_persistent_buffers_set}
    return {name: tensor for name, tensor in found if name not in left_out}


def _mapped(saved: SavedTensor) -> Tensor:
    """Return the tensor as memory of its file: no byte is read before it is used."""
    end = saved.offset_bytes + saved.size_bytes
    content = torch.from_file(str(saved.path), shared=False, size=end, dtype=torch.uint8)[saved.offset_bytes :]
    if saved.offset_bytes % saved.dtype.itemsize:  # older writers do not align
        content = content.clone()
    return content.view(saved.dtype).view(saved.shape)


def _file_behind(tensor: Tensor) -> tuple[Path, int] | None:
    """Return the safetensors file that is mapped privately as the tensor's memory, and where its bytes begin; else None."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, access, offset, _, _, *name = line.split(maxsplit=5)
        if name and name[0].endswith(".safetensors") and access.endswith("p"):
            begin, end = (int(each, 16) for each in area.split("-"))
            if begin <= address and address + tensor.nbytes <= end:
                return Path(name[0]), int(offset, 16) + address - begin
    return None


# -- safetensors files: eight bytes with the length of a header, the header as JSON, and the bytes of the tensors

# Several files come with an index, a JSON file that names the file of each tensor. Nothing here reads a tensor.

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_NAMED = 3
"""Names that an error lists."""
_MAX_HEADER_BYTES = 100_000_000
"""That of the library safetensors."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a file, in row-major order. offset_bytes: from the file's begin."""

    path: Path
    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def saved_tensors(path: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint by name. path: a file, an index, or a folder with one of them.

    Raises CheckpointError if a file is missing, cut short or no safetensors file.
    """
    found: dict[str, SavedTensor] = {}
    for file, names in _files(path).items():
        inside = _in_file(file)
        missing = [name for name in names if name not in inside]
        if missing:
            raise CheckpointError(f"{file} lacks {listed(missing)}, which the index says it has; download the file again")
        found |= inside
    return found


def check(saved: Mapping[str, SavedTensor], model: Mapping[str, torch.Tensor], tied: Mapping[str, str], path: Path) -> None:
    """Raise CheckpointError unless the checkpoint has each tensor of the model, in its shape and type, and no other one.

    model: its tensors by name. tied: names of tensors that are the same as another one: either name will do.
    """
    needed = {tied.get(name, name) for name in model}
    missing = sorted(needed - {tied.get(name, name) for name in saved})
    if missing:
        raise CheckpointError(f"{path} has no {listed(missing)}; the model needs it: is this the model's checkpoint?")
    unknown = sorted(saved.keys() - model.keys())
    if unknown:
        raise CheckpointError(f"{path} has {listed(unknown)}, and the model has not: is this the model's checkpoint?")
    for name, each in saved.items():
        wanted = model[name]
        if each.shape != tuple(wanted.shape) or each.dtype != wanted.dtype:
            raise CheckpointError(
                f"{each.path}: {name} is {each.dtype} of shape {each.shape}, the model wants {wanted.dtype} of shape "
                f"{tuple(wanted.shape)}; make the model in the type and size of the checkpoint"
            )


def listed(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    first = ", ".join(list(names)[:_NAMED])
    return first if len(names) <= _NAMED else f"{first} and {len(names) - _NAMED} more tensors"


def _files(path: Path) -> dict[Path, list[str]]:
    """Return the files of a checkpoint, each with the names that the index gives it."""
    if path.is_dir():
        known = [path / name for name in (_INDEX, _WHOLE) if (path / name).is_file()] or sorted(path.glob("*.safetensors"))
        if len(known) != 1 and known[:1] != [path / _INDEX]:
            found = f"{len(known)} safetensors files and no {_INDEX}" if known else "no safetensors file"
            raise CheckpointError(f"{path} has {found}; give the folder of a checkpoint, its index or its file")
        path = known[0]
    if not path.is_file():
        raise CheckpointError(f"{path} is not there; give a safetensors file, an index of some, or a folder with one of them")
    if path.suffix != ".json":
        return {path: []}
    try:
        of_name = json.loads(path.read_bytes())["weight_map"]
        by_file: dict[Path, list[str]] = {}
        for name, file in of_name.items():
            by_file.setdefault(path.parent / file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error})") from error
    for file, names in by_file.items():
        if not file.is_file():
            raise CheckpointError(f"{path} names {file.name}, which is not there; {listed(names)} would be in it")
    return by_file


def _in_file(path: Path) -> dict[str, SavedTensor]:
    """Return the tensors of one file."""
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else size_bytes
        if 8 + length > min(size_bytes, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is no safetensors file: its {size_bytes:,} bytes do not begin with a header")
        try:
            header = json.loads(file.read(length))
            found = {name: _described(path, 8 + length, each) for name, each in header.items() if name != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no safetensors file: its header cannot be read ({error})") from error
    for name, each in found.items():
        if each.size_bytes != math.prod(each.shape) * each.dtype.itemsize or each.offset_bytes < 8 + length:
            raise CheckpointError(f"{path} is damaged: {each.size_bytes:,} bytes for {name}, {each.dtype} of shape {each.shape}")
        if each.offset_bytes + each.size_bytes > size_bytes:
            raise CheckpointError(
                f"{path} is cut short: it has {size_bytes:,} bytes, {name} ends at {each.offset_bytes + each.size_bytes:,}; "
                "download or write it again"
            )
    return found


def _described(path: Path, data_bytes: int, entry: Mapping[str, object]) -> SavedTensor:
    begin, end = (int(each) for each in entry["data_offsets"])  # type: ignore[attr-defined]
    dtype = _DTYPES[str(entry["dtype"])]
    shape = tuple(int(each) for each in entry["shape"])  # type: ignore[attr-defined]
    return SavedTensor(path, data_bytes + begin, end - begin, dtype, shape)
