"""What every table of a manifest is.

It stands alone because the tables are in several modules.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Unknown keys are refused, values are not coerced, and a manifest never changes once read.

    The text under a key here is also the comment over that key in the file that `protocol.manifest.toml_writer` writes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
    added_later: ClassVar[frozenset[str]] = frozenset()
    """Keys that came when there were runs already. At their default the canonical form and the file leave them out: an
    older run keeps its RunId, and older peers can read it."""

    def leaves_out(self, key: str) -> bool:
        """Whether a key came later and stands at its default."""
        return key in self.added_later and bool(getattr(self, key) == type(self).model_fields[key].default)
