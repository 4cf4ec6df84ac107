"""What a run measured, to stand beside what its plan predicts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from planner.errors import FileFormatError
from planner.schema import FrozenModel

__all__ = ["MeasuredRun"]

_MOST_BYTES = 1 << 20
Amount = Annotated[float, Field(ge=0)]


class MeasuredRun(FrozenModel):
    """The fields of `teraio.Status` that a plan also predicts, or that say what the figures are worth.

    A file of a run is `json.dumps(dataclasses.asdict(teraio.status()[0]))`; other fields in it are not read.
    """

    model_config = ConfigDict(extra="ignore")

    phase: str
    iterations: int = 0
    measured_iteration_seconds: Amount | None = None
    predicted_iteration_seconds: Amount | None = None
    late_seconds: Amount = 0.0
    recompute_seconds: Amount = 0.0
    device_peak_bytes: int = 0
    drift: float | None = None
    deviations: int = 0
    replans: int = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MeasuredRun:
        """Read a file. Raises FileFormatError with the file and what is wrong."""
        remedy = "write it with json.dumps(dataclasses.asdict(teraio.status()[0]))"
        try:
            with Path(path).open("rb") as stream:
                content = json.loads(stream.read(_MOST_BYTES))
            return cls.model_validate(content)
        except OSError as error:
            raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise FileFormatError(f"{path}: not the status of a run: {place}: {first['msg']}; {remedy}") from error
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"{path}: not the status of a run, in JSON: {error}; {remedy}") from error
