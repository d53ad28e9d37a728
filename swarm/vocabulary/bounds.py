"""Bounds of message fields, as in `Annotated[int, Range(0, MAX_ROUND)]`. A message's `fault` checks several fields."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

DETAIL_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Range:
    """A number from `least` to `most`, inclusive; never NaN."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Length:
    """A number of bytes, characters or elements from `least` to `most`, inclusive."""

    least: int
    most: int
    or_none: bool = False  # Whether an empty value is allowed as well


@dataclass(frozen=True, slots=True)
class Distinct:
    """Elements are distinct."""


@dataclass(frozen=True, slots=True)
class Rising:
    """Elements are strictly increasing."""


@dataclass(frozen=True, slots=True)
class Inherits:
    """Fields that each element takes from the enclosing message, so that the wire carries them once."""

    fields: tuple[str, ...]


NonNegative = Annotated[float, Range(0.0, sys.float_info.max)]  # Finite
# Text for people, truncated by the sender, made printable by the receiver
Detail = Annotated[str, Length(0, DETAIL_CHARACTERS)]
