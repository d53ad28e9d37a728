"""What a node's owner allows it now: the share of the time in which its devices may compute, with the reason."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import Reasoned

WEEK_MINUTES: Final = 7 * 24 * 60
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
LEAST_MBIT: Final = 0.25  # Slower transfers would time out
LEAST_SHARE, SHARE_AFTER_HEAT = 0.1, 0.5
# Degrees: above the limit by HOT a node pauses; it resumes COOL below it, and computes more only BAND below it.
HOT, COOL, BAND = 8.0, 8.0, 3.0
SLOWER, FASTER = 0.75, 1.1  # Factors on the share at each reading of the sensors
USED_POWER: Final = 0.93  # Share of the power limit below which a node may compute more

_SPAN: Final = re.compile(
    r"(?:([a-z]{3})(?:-([a-z]{3}))?)?\s*(?:([01]?\d|2[0-4]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The table `limits` of settings.toml. Raises ConfigError on an invalid value."""

    upload: float | None = None  # Mbit/s
    download: float | None = None  # Mbit/s
    month: float | None = None  # GB a month, both ways
    temperature: float | None = None  # Of the GPU, else of the CPU, in degrees Celsius
    power: float | None = None  # Of the GPU, in watts
    hours: str = ""  # As "mon-fri 22:00-07:00, sat, sun", in local time
    idle: float = 0.0  # Minutes without a key or the mouse before the node computes
    battery: bool = True  # Whether to compute on battery
    programs: tuple[str, ...] = ()  # Names of programs beside which the node pauses

    def __post_init__(self) -> None:
        for name, least in (("upload", LEAST_MBIT), ("download", LEAST_MBIT), ("month", 0), ("power", 0)):
            value = getattr(self, name)
            if value is not None and not (value >= least and value > 0):
                raise ConfigError(f"limits: {name} = {value} is too small; {least or 'more than 0'} is the least")
        if self.temperature is not None and not 30 <= self.temperature <= 120:
            raise ConfigError(f"limits: temperature = {self.temperature:g} is not from 30 to 120 degrees")
        if not 0 <= self.idle <= WEEK_MINUTES:
            raise ConfigError(f"limits: idle = {self.idle:g} is not a number of minutes")
        list(hours_of(self.hours))

    @property
    def needs_sensors(self) -> bool:
        return self.temperature is not None or self.power is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensors:
    """Readings at one moment; None if unknown. `minute`: of the week, in local time, from Monday 0:00."""

    minute: int = 0
    month: float = 0.0  # GB
    temperature: float | None = None
    power: float | None = None
    idle: float | None = None  # Minutes
    on_battery: bool | None = None
    programs: frozenset[str] = frozenset()  # Running ones among those of the limits


UNLIMITED: Final = Reasoned(1.0, "")


def allowed(limits: Limits, seen: Sensors, before: Reasoned[float]) -> Reasoned[float]:
    """Returns the share of time for computing, 0 for a pause. `before`: the last share, for slow changes."""
    for reason in _pauses(limits, seen):
        return Reasoned(0.0, reason)
    share = before.value or SHARE_AFTER_HEAT
    heat, most = seen.temperature, limits.temperature
    if heat is not None and most is not None:
        if heat > most + HOT or (not before.value and heat > most - COOL):
            return Reasoned(0.0, f"{heat:.0f} °C; up to {most:g} °C are allowed")
        if heat > most or (heat > most - BAND and share < 1.0):
            return _slower(share * (SLOWER if heat > most else 1.0), f"{heat:.0f} of {most:g} °C")
    if seen.power is not None and limits.power is not None:
        if seen.power > limits.power:
            return _slower(share * max(0.5, limits.power / seen.power), f"{seen.power:.0f} of {limits.power:g} W")
        if seen.power > USED_POWER * limits.power and share < 1.0:
            return _slower(share, f"{seen.power:.0f} of {limits.power:g} W")
    if not limits.needs_sensors or share * FASTER >= 1.0:
        return UNLIMITED
    return _slower(share * FASTER, before.reason if before.value else "cool again")


def _slower(share: float, why: str) -> Reasoned[float]:
    return Reasoned(max(LEAST_SHARE, share), why)


def _pauses(limits: Limits, seen: Sensors) -> Iterator[str]:
    """Yields the reasons to pause, apart from heat."""
    spans = list(hours_of(limits.hours))
    if spans and not any((seen.minute - start) % WEEK_MINUTES < length for start, length in spans):
        yield f"outside its hours ({limits.hours})"
    if limits.month is not None and seen.month >= limits.month:
        yield f"{seen.month:.1f} of {limits.month:g} GB are used this month"
    if seen.on_battery and not limits.battery:
        yield "this machine runs on battery"
    if limits.idle and seen.idle is not None and seen.idle < limits.idle:
        yield f"somebody uses this machine; {limits.idle:g} idle minutes are wanted"
    if seen.programs:
        yield f"{', '.join(sorted(seen.programs))} runs"


def hours_of(text: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of `hours`: start and length in minutes of the week. Raises ConfigError."""
    for part in filter(None, (each.strip().lower() for each in text.split(","))):
        match = _SPAN.fullmatch(part)
        days = [day for day in match.groups()[:2] if day] if match else []
        if match is None or not set(days) <= set(DAYS):
            raise ConfigError(
                f"limits: {part!r} are not hours",
                hint='Write them as "mon-fri 22:00-07:00, sat, sun" or "20:00-06:00".',
            )
        first, last = (DAYS.index(day) for day in (days[0], days[-1])) if days else (0, 6)
        begin, end = 0, 24 * 60
        if match[3] is not None:
            begin, end = int(match[3]) * 60 + int(match[4]), int(match[5]) * 60 + int(match[6])
        length = (end - begin) % (24 * 60) or 24 * 60
        for day in range((last - first) % 7 + 1):
            yield ((first + day) % 7) * 24 * 60 + begin, length
