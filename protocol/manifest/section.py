"""The base of every table of a manifest, and numbers that several of them have."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """A table: unknown keys are refused, values not coerced. A key's docstring is its comment in the manifest file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    added_later: ClassVar[frozenset[str]] = frozenset()
    """Keys that came later. At their default canonical form and file omit them, so older runs keep their RunId."""

    def leaves_out(self, key: str) -> bool:
        return key in self.added_later and bool(getattr(self, key) == type(self).model_fields[key].default)
