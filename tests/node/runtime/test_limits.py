"""The settings file, and what the limiter makes of it."""

import asyncio
import json
import time
from pathlib import Path

import psutil
import pytest

from node.observability.events import Event, Note
from node.runtime.limits import Limiter, changed, read_limits, sense, settings_path, write_limits
from protocol.interfaces.clock import SystemClock
from protocol.transport.rate_limits import Traffic
from swarm.vocabulary.errors import ConfigError
from swarm.workload.limits import Limits, Sensors

EVERY = Limits(
    upload=8,
    download=50,
    month=250,
    temperature=80,
    power=200,
    hours="sat, sun 10:00-12:00",
    idle=5,
    battery=False,
    programs=("steam", 'a "b"\n'),
)


@pytest.mark.parametrize("limits", [EVERY, Limits()])
def test_what_is_written_is_read(tmp_path: Path, limits: Limits) -> None:
    path = tmp_path / "skipstone" / "settings.toml"
    assert read_limits(path) == Limits()
    write_limits(path, limits)
    assert read_limits(path) == limits
    assert changed(limits, {"upload": None, "battery": None, "programs": ["obs"]}).programs == ("obs",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("limits = 3", "malformed"),
        ("[limits]\nuplaod = 3", "no limit `uplaod`"),
        ('[limits]\nupload = "fast"', "upload"),
        ("[limits]\nupload = nan", "upload"),
        ("[limits]\nupload = true", "upload"),
        ("[limits]\nbattery = 1", "battery"),
        ('[limits]\nhours = "always"', "hours"),
        ("[limits", "settings.toml"),
        ("[limits]\nhours = '\x00'", "settings.toml"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_limits(path)


def test_settings_are_beside_the_key_or_in_the_configuration_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_HOME", "/home/of/skipstone")
    assert settings_path() == Path("/home/of/skipstone/settings.toml")
    monkeypatch.delenv("SKIPSTONE_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/xdg")
    assert settings_path() == Path("/etc/xdg/skipstone/settings.toml")


class Owner:
    """What a limiter does to a node, one after another."""

    def __init__(self, tmp_path: Path) -> None:
        self.path, self.usage = tmp_path / "settings.toml", tmp_path / "key.usage"
        self.traffic, self.seen, self.acts = Traffic(SystemClock()), Sensors(), list[str]()
        resume, slow = (lambda: self.acts.append("resume")), (lambda share: self.acts.append(f"{share:.2f}"))
        self.limiter = Limiter(
            self.path, self.usage, self.traffic, self, lambda why: self.acts.append(f"pause: {why}"), resume, self.sense
        )
        self._slow, self._looked = slow, asyncio.Event()

    def sense(self, limits: Limits, used_gb: float) -> Sensors:
        return self.seen

    def emit(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.acts.append(event.message)

    async def looks(self) -> list[str]:
        """What the limiter does at one look."""
        self.acts.clear()
        looking = asyncio.create_task(self.limiter.run(self._slow))
        while not self.acts or not self.acts[-1][0].isdecimal():  # a look ends with the share
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.wait([looking])
        return self.acts


async def test_a_node_pauses_slows_and_resumes_with_its_reasons(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    assert await owner.looks() == ["1.00"]
    write_limits(owner.path, Limits(battery=False, temperature=70, download=16))
    assert await owner.looks() == ["1.00"]
    assert (owner.traffic.sent.bytes_per_s, owner.traffic.received.bytes_per_s) == (float("inf"), 2e6)
    owner.seen = Sensors(on_battery=True)
    assert await owner.looks() == ["pause: this machine runs on battery", "1.00"]
    assert await owner.looks() == ["1.00"]
    owner.seen = Sensors(on_battery=False, temperature=72)
    assert await owner.looks() == ["pause: 72 °C; up to 70 °C are allowed", "1.00"]
    owner.seen = Sensors(on_battery=False, temperature=60)
    assert await owner.looks() == ["resume", "computes less: cool again", "0.55"]
    owner.path.write_text("[limits]\nupload = 'much'\n")
    notes = await owner.looks()
    assert "the earlier limits stay in force" in notes[0]
    assert owner.limiter.limits.temperature == 70
    owner.path.unlink()
    assert await owner.looks() == ["computes at full speed again", "1.00"]
    assert owner.limiter.standing().limits == Limits()


async def test_the_bytes_of_a_month_outlive_the_node(tmp_path: Path) -> None:
    first = Owner(tmp_path)
    first.traffic.sent.moved(3 * 10**9)
    await first.looks()
    again = Owner(tmp_path)
    again.traffic.received.moved(10**9)
    assert again.limiter.standing().used_gb == 4.0
    again.usage.write_text(json.dumps({"bytes": 5 * 10**9, "month": "2001-01"}))
    assert Owner(tmp_path).limiter.standing().used_gb == 0.0
    again.usage.write_text("no file of ours")
    assert Owner(tmp_path).limiter.standing().used_gb == 0.0


def test_the_sensors_of_this_machine_are_read_where_it_has_them() -> None:
    seen = sense(EVERY, 1.0)
    now = time.localtime()
    assert seen.minute - (now.tm_wday * 1440 + now.tm_hour * 60 + now.tm_min) in (0, -1)
    assert seen.month == 1.0
    assert seen.temperature is None or 0 < seen.temperature < 130
    own = psutil.Process().name()
    assert sense(Limits(programs=(own.upper(), "no such program")), 0.0).programs == {own.upper()}
