"""`skipstone service` with a systemd that only notes what it is told."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.__main__ import app
from node.cli.service import quoted, unit_path, watchdog

LINK = "skipstone:" + "a" * 26 + "@192.0.2.7:4242"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which `systemctl` and `loginctl` write their words."""
    for name in ("systemctl", "loginctl"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $@ >> {tmp_path}/told\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SKIPSTONE_HOME", str(tmp_path / "a $HOME of 5%"))
    return tmp_path / "told"


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["service", *words], prog_name="skipstone")
    return done.exit_code, done.output


def test_a_service_joins_with_the_given_options_and_is_removed(told: Path) -> None:
    assert run("install", LINK, "--threads", "2")[0] == 0
    home, unit = Path(os.environ["SKIPSTONE_HOME"]), unit_path().read_text()
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    assert line.endswith(
        f'"join" {quoted(str(home / "service.link"))} "--yes" "--threads" "2" "--checkpoint-dir"'
        f" {quoted(str(home / 'service'))}"
    )
    assert f'Environment="SKIPSTONE_HOME={home.parent}/a $$HOME of 5%%"' in unit
    assert LINK not in unit, "other users can read it"
    assert (home / "service.link").read_text() == f"{LINK}\n"
    verbs = [line.split()[2] for line in told.read_text().splitlines() if line.startswith("systemctl")]
    assert verbs == ["show-environment", "daemon-reload", "enable", "restart"]
    assert "loginctl enable-linger" in told.read_text()
    assert run("remove")[0] == 0
    assert not unit_path().exists()
    assert "disable --now skipstone.service" in told.read_text()


def test_without_systemd_nothing_is_written(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (told.parent / "systemctl").write_text("#!/bin/sh\necho no bus >&2; exit 1\n")
    code, said = run("install", LINK)
    assert (code, unit_path().exists()) == (78, False)
    assert "no bus" in said
    monkeypatch.setenv("PATH", "")
    assert "does not run systemd" in run("install", LINK)[1]


async def test_the_watchdog_hears_from_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        await watchdog()  # nobody asks
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "3000")
        telling = asyncio.create_task(watchdog())
        heard = [await asyncio.get_running_loop().sock_recv(systemd, 64) for _ in range(3)]
        telling.cancel()
    assert heard == [b"WATCHDOG=1"] * 3
