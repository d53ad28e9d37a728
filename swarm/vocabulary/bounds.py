"""Bounds of single message fields, as in `Annotated[int, Range(0, MAX_ROUND)]`. `fault` methods compare fields."""

import sys
from dataclasses import dataclass
from typing import Annotated

DETAIL_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Range:
    """Bound: a number from `least` to `most`, inclusive; never NaN."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Length:
    """Bound: a length in bytes, characters or elements from `least` to `most`, inclusive."""

    least: int
    most: int
    or_none: bool = False  # Whether an empty value is allowed as well


@dataclass(frozen=True, slots=True)
class Distinct:
    """Bound: all elements of a sequence are distinct."""


@dataclass(frozen=True, slots=True)
class Rising:
    """Bound: the elements of a sequence are strictly increasing."""


@dataclass(frozen=True, slots=True)
class Inherits:
    """Fields that each element of a sequence takes from the enclosing message, so that they are sent once."""

    fields: tuple[str, ...]


NonNegative = Annotated[float, Range(0.0, sys.float_info.max)]  # Finite
# Text for people, truncated by the sender, made printable by the receiver
Detail = Annotated[str, Length(0, DETAIL_CHARACTERS)]
