"""Keeps a node within its owner's limits: reads them and the machine's sensors, and caps, slows or pauses the node."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from node.context.whole_file import write_whole
from node.observability.events import EventSink, Note
from node.observability.typed_json import from_json
from protocol.transport.rate_limits import Traffic
from swarm.vocabulary.errors import ConfigError, ProtocolViolation
from swarm.vocabulary.types import Reasoned
from swarm.workload.limits import UNLIMITED, Limits, Sensors, allowed

LOOK_S: Final = 2.0
MOST_BYTES: Final = 64 * 1024
GIGABYTE: Final = 1e9


def settings_path() -> Path:
    """Returns `$SKIPSTONE_HOME/settings.toml`, else `skipstone/settings.toml` in the XDG configuration folder."""
    if home := os.environ.get("SKIPSTONE_HOME"):
        return Path(home) / "settings.toml"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "skipstone" / "settings.toml"


def read_limits(path: Path) -> Limits:
    """Reads the table `limits` of a settings file; a missing file limits nothing. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode()
        table = tomllib.loads(text)
    except FileNotFoundError:
        return Limits()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return limits_of(table.get("limits", {}), str(path))


def limits_of(table: Mapping[str, Any], where: str) -> Limits:
    """Checks limits by name. Raises ConfigError."""
    names = [each.name for each in dataclasses.fields(Limits)]
    for name in table if isinstance(table, dict) else ():
        if name not in names:
            raise ConfigError(f"{where}: there is no limit `{name}`", hint=f"There are: {', '.join(names)}.")
    try:
        return from_json(Limits, table, f"{where}: limits")
    except ProtocolViolation as error:
        raise ConfigError(str(error)) from None


def changed(limits: Limits, changes: Mapping[str, Any]) -> Limits:
    """Returns the limits with changes by name; None restores a default. Raises ConfigError."""
    if not isinstance(changes, dict):
        raise ConfigError("limits: not a table")
    whole = dataclasses.asdict(limits) | changes
    return limits_of({name: value for name, value in whole.items() if value is not None}, "limits")


def write_limits(path: Path, limits: Limits) -> None:
    """Replaces the settings file. Raises ConfigError if it cannot be written."""
    given = {f.name: value for f in dataclasses.fields(limits) if (value := getattr(limits, f.name)) != f.default}
    # JSON's numbers, strings and lists of strings are TOML too.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in given.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n".join(["# Written by `skipstone limits`.", "[limits]", *lines, ""]).encode())
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Standing:
    """The limits, the allowed share of computing time with its reason, the GB moved this month, and two sensors."""

    limits: Limits
    share: float
    reason: str
    used_gb: float
    temperature: float | None = None
    power: float | None = None


def sense(limits: Limits, used_gb: float) -> Sensors:
    """Reads the sensors that the limits need."""
    local = time.localtime()
    heat, power = _gpu()
    battery = None if limits.battery else psutil.sensors_battery()
    return Sensors(
        minute=(local.tm_wday * 24 + local.tm_hour) * 60 + local.tm_min,
        month=used_gb,
        temperature=_cpu_temperature() if heat is None and limits.temperature is not None else heat,
        power=power,
        idle=_idle_minutes() if limits.idle else None,
        on_battery=None if battery is None else not battery.power_plugged,
        programs=_running(limits.programs) if limits.programs else frozenset(),
    )


def _gpu() -> tuple[float | None, float | None]:
    """Returns the highest temperature and the sum of the power of this machine's NVIDIA GPUs."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        heat = [float(pynvml.nvmlDeviceGetTemperature(card, pynvml.NVML_TEMPERATURE_GPU)) for card in cards]
        power = [pynvml.nvmlDeviceGetPowerUsage(card) / 1e3 for card in cards]
        return max(heat, default=None), sum(power) if power else None
    return None, None


def _cpu_temperature() -> float | None:
    sensors: dict[str, Any] = getattr(psutil, "sensors_temperatures", dict)()  # not on every system
    return max((each.current for of_chip in sensors.values() for each in of_chip), default=None)


def _running(names: tuple[str, ...]) -> frozenset[str]:
    wanted = {name.lower(): name for name in names}
    found = {(process.info["name"] or "").lower().removesuffix(".exe") for process in psutil.process_iter(["name"])}
    return frozenset(name for low, name in wanted.items() if low.removesuffix(".exe") in found)


def _idle_minutes() -> float | None:
    """Returns the minutes since the last input on a terminal, keyboard or mouse; None if unknown."""
    ages = []
    for terminal in {user.terminal for user in psutil.users() if user.terminal}:
        with contextlib.suppress(OSError):
            ages.append(time.time() - Path("/dev", terminal).stat().st_atime)
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, KeyError):
        command = ["loginctl", "show-seat", "seat0"]
        lines = subprocess.run(command, capture_output=True, timeout=1.0, check=True, text=True).stdout.splitlines()  # noqa: S603
        seat = dict(line.split("=", 1) for line in lines)
        if seat["ActiveSession"]:  # otherwise nobody sits there
            ages.append(time.time() - int(seat["IdleSinceHint"]) / 1e6 if seat["IdleHint"] == "yes" else 0.0)
    return min(ages) / 60 if ages else None


class Limiter:
    """Applies the limits of a settings file, which may change at any time. `usage`: file of this month's bytes."""

    def __init__(
        self,
        path: Path,
        usage: Path,
        traffic: Traffic,
        events: EventSink,
        pause: Callable[[str], None],
        resume: Callable[[], None],
        sense: Callable[[Limits, float], Sensors] = sense,
    ) -> None:
        self._sense = sense
        self._path, self._usage_path, self._traffic, self._events = path, usage, traffic, events
        self._pause, self._resume = pause, resume
        self._stamp: object = None
        self._written_at = time.monotonic()
        self._month = time.strftime("%Y-%m")
        self._bytes_before = _read_usage(usage, self._month)
        self.limits, self.now, self._seen = Limits(), UNLIMITED, Sensors()

    async def run(self, slow: Callable[[float], None]) -> None:
        """Looks at settings and sensors until cancelled. `slow` sets the share of the time in which devices compute."""
        try:
            while True:
                self._read()
                self._seen = await asyncio.to_thread(self._sense, self.limits, self._used_bytes() / GIGABYTE)
                self._apply(allowed(self.limits, self._seen, self.now))
                slow(self.now.value or 1.0)
                if time.monotonic() - self._written_at > 60.0:
                    self._write_usage()
                await asyncio.sleep(LOOK_S)
        finally:
            self._write_usage()

    def standing(self) -> Standing:
        used, seen = self._used_bytes() / GIGABYTE, self._seen
        return Standing(self.limits, self.now.value, self.now.reason, used, seen.temperature, seen.power)

    def change(self, table: Mapping[str, Any]) -> None:
        """Changes some limits, for this node and all later ones. Raises ConfigError."""
        limits = changed(self.limits, table)
        write_limits(self._path, limits)
        self.limits = limits
        self._cap()

    def _read(self) -> None:
        stamp = None
        with contextlib.suppress(OSError):
            found = self._path.stat()
            stamp = found.st_mtime_ns, found.st_size, found.st_ino
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.limits = read_limits(self._path)
        except ConfigError as error:  # the limits before stay in force
            self._events.emit(Note("warning", f"{error}; the earlier limits stay in force"))
        self._cap()

    def _cap(self) -> None:
        caps = self.limits.upload, self.limits.download
        sent, received = (math.inf if cap is None else cap * 1e6 / 8 for cap in caps)
        self._traffic.sent.bytes_per_s, self._traffic.received.bytes_per_s = sent, received

    def _apply(self, now: Reasoned[float]) -> None:
        before, self.now = self.now, now
        if not now.value:
            if now != before:
                self._pause(now.reason)
            return
        if not before.value:
            self._resume()
        if (now.value < 1.0) != (0 < before.value < 1.0):
            what = f"computes less: {now.reason}" if now.value < 1.0 else "computes at full speed again"
            self._events.emit(Note("info", what))

    def _used_bytes(self) -> int:
        """Returns the bytes of this month, both ways."""
        month, moved = time.strftime("%Y-%m"), self._traffic.sent.bytes + self._traffic.received.bytes
        if month != self._month:
            self._month, self._bytes_before = month, -moved
        return self._bytes_before + moved

    def _write_usage(self) -> None:
        self._written_at = time.monotonic()
        text = json.dumps({"bytes": self._used_bytes(), "month": self._month})
        with contextlib.suppress(OSError):
            write_whole(self._usage_path, text.encode())


def _read_usage(path: Path, month: str) -> int:
    """Returns the bytes of `month` so far."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        table = json.loads(path.read_text())
        return int(table["bytes"]) if table["month"] == month else 0
    return 0
