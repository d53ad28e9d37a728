"""Reading a TOML table strictly: each key is asked for once with its type and range, and what nobody asked for is an
error."""

from __future__ import annotations

from typing import Any

from node.lab.emulation.link_shape import MBIT, Fault, ShapeChange
from swarm.vocabulary.errors import ConfigError

MAX_TEXT = 100


class Table:
    """One table; `where` is its path, for messages. Every method raises ConfigError with the path of the key."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values = values
        self._where = where
        self._asked: set[str] = set()

    def path(self, key: str) -> str:
        """The key as it is named in messages."""
        return f"{self._where}.{key}" if self._where else key

    def text(self, key: str) -> str:
        """A short text, which must be there."""
        value = self._take(key, ())
        if isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable():
            return value
        raise ConfigError(f"{self.path(key)} must be a text of 1 to {MAX_TEXT} characters")

    def text_or_none(self, key: str) -> str | None:
        """A short text if it is there."""
        self._asked.add(key)
        return self.text(key) if key in self._values else None

    def number(self, key: str, least: float, most: float, *default: float, whole: bool = False) -> float:
        """A number in a range; a default need not be in it."""
        value = self._take(key, default)
        if key not in self._values:
            return float(value)
        kinds = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            what = "a whole number" if whole else "a number"
            raise ConfigError(f"{self.path(key)} must be {what} from {least:g} to {most:g}, not {value!r}")
        return value

    def flag(self, key: str) -> bool:
        """Yes or no; no when it is not there."""
        value = self._take(key, (False,))
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path(key)} must be true or false, not {value!r}")
        return value

    def items(self, key: str) -> list[Any]:
        """A list of anything; it must be there."""
        value = self._take(key, ())
        if not isinstance(value, list):
            raise ConfigError(f"{self.path(key)} must be a list")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """A table for somebody else to check; empty when it is not there."""
        value = self._take(key, ({},))
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path(key)} must be a table")
        return value

    def tables(self, key: str) -> list[Table]:
        """The tables of `[[key]]`; none when there are none."""
        value = self._take(key, ([],))
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ConfigError(f"{self.path(key)} must be tables: write [[{key}]]")
        return [Table(item, f"{self.path(key)}[{number}]") for number, item in enumerate(value)]

    def shape_change(self) -> ShapeChange:
        """`latency_ms`, `jitter_ms`, `up_mbit`, `down_mbit` and `fault`, each if it is there."""
        fault = self.text_or_none("fault")
        if fault is not None and fault not in {known.value for known in Fault}:
            raise ConfigError(f"{self.path('fault')}: {fault!r} is none of {', '.join(known.value for known in Fault)}")
        return ShapeChange(
            latency_s=self._scaled("latency_ms", 60_000.0, 0.001),
            jitter_s=self._scaled("jitter_ms", 60_000.0, 0.001),
            up_bytes_per_s=self._scaled("up_mbit", 1e6, MBIT),
            down_bytes_per_s=self._scaled("down_mbit", 1e6, MBIT),
            fault=None if fault is None else Fault(fault),
        )

    def finish(self) -> None:
        """Raises ConfigError for the first key that nobody has asked for."""
        for key in self._values:
            if key not in self._asked:
                known = ", ".join(sorted(self._asked))
                raise ConfigError(f"{self.path(key)} is no key of a scenario here; there are {known}")

    def _scaled(self, key: str, most: float, unit: float) -> float | None:
        """A key that may be missing. Rates (units of more than 1) must be more than 0."""
        if key not in self._values:
            self._asked.add(key)
            return None
        return self.number(key, 0.0 if unit < 1 else 0.01, most) * unit

    def _take(self, key: str, default: tuple[Any, ...]) -> Any:
        self._asked.add(key)
        if key in self._values:
            return self._values[key]
        if default:
            return default[0]
        raise ConfigError(f"{self.path(key)} is missing")
