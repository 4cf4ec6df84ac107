"""Base classes of everything that is in a trace or a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

__all__ = ["FrozenModel", "GrownModel"]


class FrozenModel(BaseModel):
    """Base of all file models: immutable, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields replaced. The new values are not validated; cached properties are computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


class GrownModel(FrozenModel):
    """Base of models that got the fields `added_later` after files of them had been written.

    Such a field is left out of the file where it has its default value. So older files and their fingerprints stay the same.
    """

    added_later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        content: dict[str, object] = write(self)
        for name in self.added_later:
            if getattr(self, name) == type(self).model_fields[name].default:
                content.pop(name, None)
        return content
