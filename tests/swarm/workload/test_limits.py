"""What limits allow, over times and readings that a test makes up."""

import pytest

from swarm.vocabulary.errors import ConfigError
from swarm.workload.limits import DAYS, UNLIMITED, WEEK_MINUTES, Limits, Sensors, allowed, hours_of


def minute(day: str, clock: str) -> int:
    hours, minutes = clock.split(":")
    return (DAYS.index(day) * 24 + int(hours)) * 60 + int(minutes)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        (
            "mon-fri 22:00-07:00",
            ["mon 22:00", "tue 6:59", "sat 6:59", "fri 23:00"],
            ["mon 6:00", "sat 22:00", "tue 7:00"],
        ),
        ("sat, sun", ["sat 0:00", "sun 23:59"], ["mon 0:00", "fri 23:59"]),
        ("20:00-24:00", ["mon 20:00", "sun 23:59"], ["mon 0:00", "wed 19:59"]),
        ("fri-mon", ["fri 1:00", "sun 1:00", "mon 1:00"], ["tue 0:00", "thu 23:00"]),
        ("SUN 23:00-02:00", ["sun 23:30", "mon 1:59"], ["mon 2:00"]),
        ("", ["mon 0:00"], []),
        ("tue 00:00-00:00", ["tue 0:00", "tue 23:59"], ["wed 0:00"]),
    ],
)
def test_a_node_runs_within_its_hours_only(hours: str, inside: list[str], outside: list[str]) -> None:
    for moment in (*inside, *outside):
        verdict = allowed(Limits(hours=hours), Sensors(minute=minute(*moment.split())), UNLIMITED)
        assert bool(verdict.value) == (moment in inside), moment
        assert verdict.value or hours in verdict.reason


@pytest.mark.parametrize("hours", ["25:00-26:00", "mon-xyz", "noon", "22:00", "mon 22:00-07:70", "10:00-12:00 mon"])
def test_what_is_not_hours_is_refused(hours: str) -> None:
    with pytest.raises(ConfigError, match="hours"):
        list(hours_of(hours))


@pytest.mark.parametrize(
    "wrong",
    [{"upload": 0.1}, {"download": -1.0}, {"month": 0.0}, {"temperature": 10.0}, {"idle": -1.0}, {"power": 0.0}],
)
def test_impossible_limits_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


@pytest.mark.parametrize(
    ("limits", "seen", "reason"),
    [
        (Limits(battery=False), Sensors(on_battery=True), "battery"),
        (Limits(idle=5), Sensors(idle=4.9), "uses this machine"),
        (Limits(month=100), Sensors(month=100.0), "100 GB"),
        (Limits(programs=("steam",)), Sensors(programs=frozenset({"steam"})), "steam runs"),
    ],
)
def test_each_limit_pauses_with_its_reason(limits: Limits, seen: Sensors, reason: str) -> None:
    verdict = allowed(limits, seen, UNLIMITED)
    assert verdict.value == 0
    assert reason in verdict.reason
    assert allowed(limits, Sensors(), verdict) == UNLIMITED  # without a reading the node runs


def settled(limits: Limits, full_watts: float, ambient: float, watts_per_degree: float) -> list[tuple[float, float]]:
    """Simulates a device whose temperature follows its power with a delay; returns shares and temperatures."""
    now, heat, history = UNLIMITED, ambient, list[tuple[float, float]]()
    for _ in range(600):
        power = now.value * full_watts
        heat += 0.05 * (ambient + power / watts_per_degree - heat)
        now = allowed(limits, Sensors(temperature=heat, power=power), now)
        history.append((now.value, heat))
    return history


def test_a_hot_device_computes_less_until_its_temperature_holds() -> None:
    history = settled(Limits(temperature=75), full_watts=300, ambient=30, watts_per_degree=5)
    assert max(heat for _, heat in history) < 75 + 8
    late = history[300:]
    assert all(0 < share < 1 for share, _ in late)
    assert 0.6 < sum(share for share, _ in late) / len(late) < 0.76  # 0.75 would hold 75 degrees
    assert max(heat for _, heat in late) <= 77


def test_far_too_hot_a_device_pauses_and_resumes_only_once_it_is_cool() -> None:
    limits = Limits(temperature=75)
    paused = allowed(limits, Sensors(temperature=84), UNLIMITED)
    assert (paused.value, "84" in paused.reason) == (0, True)
    assert allowed(limits, Sensors(temperature=74), paused).value == 0
    resumed = allowed(limits, Sensors(temperature=66), paused)
    assert resumed.value == 0.55
    while resumed.value < 1:
        faster = allowed(limits, Sensors(temperature=66), resumed)
        assert faster.value > resumed.value
        resumed = faster


def test_the_power_limit_holds() -> None:
    history = settled(Limits(power=200), full_watts=320, ambient=20, watts_per_degree=10)
    late = [320 * share for share, _ in history[50:]]
    assert max(late) <= 1.1 * 200
    assert 0.85 * 200 < sum(late) / len(late) <= 200


def test_hours_of_a_week_are_within_it() -> None:
    assert all(0 <= start < WEEK_MINUTES and 0 < length <= 1440 for start, length in hours_of("mon-sun 23:00-22:59"))
