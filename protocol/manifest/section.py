"""What every table of a manifest is, and the numbers that several of them have.

It stands alone because the tables are in several modules.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Unknown keys are refused, values are not coerced, and a manifest never changes once read.

    The text under a key here is also the comment over that key in the file that `protocol.manifest.signing` writes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    added_later: ClassVar[frozenset[str]] = frozenset()
    """Keys that came when there were runs already. At their default the canonical form and the file leave them out: an
    older run keeps its RunId, and older peers can read it."""

    def leaves_out(self, key: str) -> bool:
        """Whether a key came later and stands at its default."""
        return key in self.added_later and bool(getattr(self, key) == type(self).model_fields[key].default)
