"""The tables of a scenario file: each key is a field with its type and range, and what nobody asked for is an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from lab.emulation.link_shape import MBIT, Fault, Site, profile_of
from swarm.vocabulary.errors import ConfigError

LONGEST_S = 7 * 24 * 3600.0
MAX_TEXT = 100


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(_printable)]
Moment = Annotated[float, Field(ge=0, le=LONGEST_S)]
"""Seconds after the run has begun."""
Span = Annotated[float, Field(ge=0.1, le=LONGEST_S)]
"""Seconds that something takes. A default of 0 stands for never, or for no end."""


class ScenarioTable(BaseModel):
    """A table as read: strict, without unknown keys. A field `for_s` or `from_` is the key `for` or `from`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.removesuffix("_s").removesuffix("_"),
        validate_by_name=True,
    )


def _known_profile(name: str) -> str:
    return profile_of(name).name


def _members(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    return tuple(value) if info.context is None else info.context.members(value)


def _sides(value: Any, info: ValidationInfo) -> tuple[tuple[int, ...], ...]:
    sides = tuple(_members(side, info) for side in value) if isinstance(value, list | tuple) else ()
    members = [member for side in sides for member in side]
    if len(sides) < 2 or len(set(members)) < len(members):
        raise ValueError("must be two or more lists that share no peer")
    return sides


def _hosted(stage: int, info: ValidationInfo) -> int:
    if info.context is not None and not stage < info.context.manifest.stages.count:
        raise ValueError(f"must be a whole number from 0 to {info.context.manifest.stages.count - 1}")
    return stage


ProfileName = Annotated[str, AfterValidator(_known_profile)]
Peers = Annotated[tuple[int, ...], BeforeValidator(_members)]
"""In the file a list of indices and names of groups."""
Sides = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_sides)]
"""Two or more such lists that share nobody."""
Stage = Annotated[int, Field(ge=0), AfterValidator(_hosted)]
Expert = Annotated[int, Field(ge=0)]

_Delay = Annotated[float, Field(ge=0, le=60_000)]
_Rate = Annotated[float, Field(ge=0.01, le=1e6)]


class LinkTable(ScenarioTable):
    """The keys that say how a link differs; None leaves it as it is."""

    latency_ms: _Delay | None = None
    jitter_ms: _Delay | None = None
    up_mbit: _Rate | None = None
    down_mbit: _Rate | None = None
    fault: Annotated[Fault | None, Field(strict=False)] = None

    def applied_to(self, site: Site) -> Site:
        """The site changed by what is given of the link. Raises ConfigError when a value is out of range."""
        changes: dict[str, Any] = {of: getattr(self, key) * unit for key, (of, unit, _) in self._given().items()}
        if self.fault is not None:
            changes["fault"] = self.fault
        return Site(replace(site.shape, **changes), site.region)

    def link_in_words(self) -> tuple[str, ...]:
        """The given keys in words, for a diary."""
        words = tuple(text.format(getattr(self, key)) for key, (_, _, text) in self._given().items())
        return words if self.fault is None else (*words, f"fault {self.fault.value}")

    def _given(self) -> dict[str, tuple[str, float, str]]:
        return {key: meant for key, meant in _MEANT.items() if getattr(self, key) is not None}


_MEANT: Final = {
    "latency_ms": ("latency_s", 0.001, "latency {:g} ms"),
    "jitter_ms": ("jitter_s", 0.001, "jitter {:g} ms"),
    "up_mbit": ("up_bytes_per_s", MBIT, "{:g} Mbit/s up"),
    "down_mbit": ("down_bytes_per_s", MBIT, "{:g} Mbit/s down"),
}
"""Which field of the link a key is, in which unit, and how it is said."""

Kind = TypeVar("Kind", bound=ScenarioTable)


def read_table(kind: type[Kind], values: Any, where: str = "", scenario: object = None) -> Kind:
    """The table as a `kind`. Raises ConfigError with the path of the first key that is wrong.

    Args:
        where: the table's own path.
        scenario: whose peers and stages the keys name.
    """
    try:
        return kind.model_validate(values, context=scenario, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ConfigError(_explained(dict(error.errors()[0]), where)) from None


def _explained(error: Mapping[str, Any], where: str) -> str:
    path = where
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    match error["type"]:
        case "extra_forbidden":
            return f"{path} is no key of a scenario here"
        case "missing":
            return f"{path} is missing"
        case "tuple_type":
            return f"{path} must be tables: write [[{path}]]"
        case "value_error":
            return f"{path}: {error['ctx']['error']}"
        case _:
            return f"{path}: {error['msg']}, not {str(error['input'])[:MAX_TEXT]!r}"
