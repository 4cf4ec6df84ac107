"""Reads where the tensors of a safetensors checkpoint are, and whether a model can take them. Reads no tensor.

The format is that of the library safetensors: eight bytes with the length of a header, the header as JSON, and the bytes of the
tensors. Several files come with an index, a JSON file that names the file of each tensor.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.errors import CheckpointError

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
            described = {name: each for name, each in header.items() if name != "__metadata__"}
            found = {name: _described(path, 8 + length, each) for name, each in described.items()}
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
