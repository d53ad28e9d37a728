"""Bounds of message fields, as in `Annotated[int, Range(0, MAX_ROUND)]`; a method `fault` relates several fields."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

DETAIL_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Range:
    """A number from `least` to `most`, both included; so it is never NaN."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Length:
    """Bytes, characters or elements from `least` to `most`, both included."""

    least: int
    most: int
    or_none: bool = False  # Or empty


@dataclass(frozen=True, slots=True)
class Distinct:
    """The bound that no element comes twice."""


@dataclass(frozen=True, slots=True)
class Rising:
    """The bound that each element is larger than the one before it."""


@dataclass(frozen=True, slots=True)
class Inherits:
    """The fields of each element that are those of the message that it is in, which says them once for all."""

    fields: tuple[str, ...]


NonNegative = Annotated[float, Range(0.0, sys.float_info.max)]  # Finite
Detail = Annotated[str, Length(0, DETAIL_CHARACTERS)]  # For people: cut when sent, made printable when read
