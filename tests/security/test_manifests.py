"""A manifest says what a run trains on; what of this machine is opened for it, the person here says."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest
from tests.e2e.small_run import PATIENCE_S, small_run

NODE = (sys.executable, "-P", "-m", "skipstone", "join")
HERE = ("--listen", "127.0.0.1", "--advertise", "127.0.0.1", "--reach", "direct", "--threads", "1", "--json")
WATCHED = "SKIPSTONE_TEST_WATCHED"
NOTED = "SKIPSTONE_TEST_NOTED"

NOTING = f"""
import os, sys
def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and os.environ[{WATCHED!r}] in str(arguments[0]):
        os.write(noted, f"{{event}} {{arguments[0]}}\\n".encode())
if {WATCHED!r} in os.environ:
    noted = os.open(os.environ[{NOTED!r}], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.addaudithook(note)
"""


class Victim:
    """Somebody's machine: a home with a key in it that is nobody else's business, and what a node there opens of it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "victim"
        self.noted = folder / "noted"
        (self.home / ".ssh").mkdir(parents=True)
        (self.home / ".ssh" / "id_ed25519").write_text("canary " * 1000)
        (folder / "code").mkdir()
        (folder / "code" / "sitecustomize.py").write_text(NOTING)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("XDG_")},
            "HOME": str(self.home),
            "SKIPSTONE_HOME": str(self.home / "skipstone"),
            "PYTHONPATH": os.pathsep.join((str(folder / "code"), str(Path(__file__).parent.parent.parent))),
            WATCHED: ".ssh",
            NOTED: str(self.noted),
        }

    def opened(self) -> list[str]:
        return self.noted.read_text().splitlines() if self.noted.exists() else []


@asynccontextmanager
async def running(*command: str, **environment: Any) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, **environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.communicate(), 25)
        except TimeoutError:
            process.kill()
            await process.communicate()


async def events_until_serving(node: Process) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    assert node.stdout is not None
    async for line in node.stdout:
        seen.append(json.loads(line))
        if seen[-1]["event"] == "node" and seen[-1]["state"] == "serving":
            break
    return seen


def stranger_s(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    """The command of the stranger's node, which serves stage 1 and waits for somebody who reads."""
    key = folder / "stranger.key"
    (folder / "run.toml").write_bytes(sign_manifest(manifest, Identity.create(key)).text)
    link = ("--link-file", str(folder / "link"))
    return (*NODE, str(folder / "run.toml"), "--stage", "1", "--identity", str(key), *link, *HERE)


async def written(file: Path) -> str:
    while not file.exists():
        await asyncio.sleep(0.05)
    return file.read_text().strip()


@pytest.mark.e2e
async def test_a_stranger_s_link_opens_nothing_of_whoever_joins_it(tmp_path: Path) -> None:
    """With no option at all; stage 0 has no peer, so placement would give it to the newcomer."""
    victim = Victim(tmp_path)
    manifest = small_run(Path("~/.ssh"), blocks=(0, 1), is_open=True)
    async with asyncio.timeout(PATIENCE_S), running(*stranger_s(tmp_path, manifest), env=victim.environment):
        link = await written(tmp_path / "link")
        async with running(*NODE, link, *HERE, env=victim.environment) as node:
            seen = await events_until_serving(node)
        opened = victim.opened()
        text = ("--text", str(victim.home / ".ssh"))
        async with running(*NODE, link, *text, *HERE, env=victim.environment) as node:
            named = await events_until_serving(node)
    assert seen[-1]["module"] == "1.0"
    told = [
        event["message"] for event in seen if event["event"] == "note" and "cannot take stage 0" in event["message"]
    ]
    assert len(told) == 1
    assert "--text" in told[0]
    assert opened == []
    assert named[-1]["module"] == "0.0"
    assert victim.opened(), "the trap itself works"


@pytest.mark.e2e
async def test_who_insists_on_stage_0_is_told_what_to_say(tmp_path: Path) -> None:
    victim = Victim(tmp_path)
    manifest = small_run(Path("~/.ssh"), blocks=(0, 1), is_open=True)
    (tmp_path / "run.toml").write_bytes(sign_manifest(manifest, Identity.generate()).text)
    command = (*NODE, str(tmp_path / "run.toml"), "--stage", "0", *HERE)
    node = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=victim.environment)
    _, said = await asyncio.wait_for(node.communicate(), PATIENCE_S)
    assert node.returncode == 78
    assert b"cannot take stage 0" in said
    assert b"--text" in said
    assert victim.opened() == []
    assert b"hidden states back into text" in said, "what joining means is said before"
