"""Attacks whose losses are compared with an honest run's at every moment (`tests/security/attack.py`)."""

import pytest

from tests.security.attack import experiment, parsed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

MODES = ("reverse", "noise", "drift", "ordinary", "sched", "nan", "tokens", "last-number", "steps", "names")


@pytest.mark.parametrize(
    ("mode", "seconds"), [("forged-rosters", 20), *(pytest.param(mode, 40, marks=pytest.mark.long) for mode in MODES)]
)
async def test_an_attack_costs_no_loss_and_no_honest_peer_its_name(mode: str, seconds: int) -> None:
    # Beside other tests two honest runs differ by more than the 2 % that count on a quiet machine.
    times = ("--seconds", str(seconds), "--grace", str(seconds // 2))
    report = await experiment(parsed([mode, "--names", "4", *times, "--most", "1.25"]))
    assert report["passed"], report["missed"]
