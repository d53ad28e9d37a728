"""The scripts of the image, without an engine."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from node.runtime.leave_socket import endpoint_path, leave_requests
from protocol.identity.certificates import make_credentials
from protocol.identity.keys import Identity
from swarm.vocabulary.types import RunId

ROOT = Path(__file__).parent.parent.parent
ENTRYPOINT = ROOT / "docker" / "entrypoint.py"
HEALTH_CHECK = ROOT / "docker" / "healthcheck.py"
LONG_S = 20.0
LINK = "skipstone:run@peer"
SKIPSTONE = f"""#!{sys.executable}
# Stands for the command: says how it was called and lives on while standard input is open.
import json, os, sys
told = {{name: value for name, value in os.environ.items() if name.startswith("SKIPSTONE_")}}
home = os.path.realpath(os.environ["SKIPSTONE_HOME"])
print(json.dumps({{"arguments": sys.argv[1:], "pid": os.getpid(), "home": home, **told}}), flush=True)
if sys.argv[1] == "new":
    open(sys.argv[2], "x").close()
elif sys.argv[1] != "invite":
    sys.stdin.read()
"""


@asynccontextmanager
async def node_at(identity_path: Path) -> AsyncIterator[int]:
    credentials = make_credentials(Identity.create(identity_path), RunId("0" * 64))
    server = grpc.aio.server()
    keys = [(credentials.private_key_pem, credentials.certificate_pem)]
    wanted = grpc.ssl_server_credentials(keys, credentials.authority_pem, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", wanted)
    await server.start()
    async with leave_requests(identity_path, lambda: pytest.fail("a check is no request to leave")):
        yield port
    await server.stop(None)


async def check(folder: Path, port: int) -> tuple[int, str]:
    """The exit code of the health check, and what it says."""
    variables = {"SKIPSTONE_HOME": str(folder), "SKIPSTONE_PORT": str(port)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HEALTH_CHECK), stdout=asyncio.subprocess.PIPE, env={**os.environ, **variables}
    )
    async with asyncio.timeout(LONG_S):
        said, _ = await process.communicate()
    return process.returncode or 0, said.decode()


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


class Container:
    """The entrypoint in folders of its own. `volume` is kept over its life."""

    def __init__(self, folder: Path, volume: Path, *arguments: str, **variables: str) -> None:
        (folder / "bin").mkdir(parents=True)
        command = folder / "bin" / "skipstone"
        command.write_text(SKIPSTONE)
        command.chmod(0o755)
        search = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": search, "SKIPSTONE_HOME": str(folder / "home"), "SKIPSTONE_IDENTITIES": str(volume)}
        program, pipe = [sys.executable, str(ENTRYPOINT), *arguments], subprocess.PIPE
        self.process = subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True, env=own | variables)

    def said(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(LONG_S)}"
        return dict(json.loads(line))

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        code = self.process.wait(LONG_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Container]]:
    """Starts containers that share a volume and end with the test."""
    started: list[Container] = []

    def start(*arguments: str, **variables: str) -> Container:
        started.append(Container(tmp_path / f"container-{len(started)}", tmp_path / "volume", *arguments, **variables))
        return started[-1]

    yield start
    for container in started:
        container.end()


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"image_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestEntrypoint:
    def test_it_becomes_the_node(self, start: Callable[..., Container]) -> None:
        container = start("join", LINK, "--json")
        said = container.said()
        assert said["arguments"] == ["join", LINK, "--json"]
        assert said["pid"] == container.process.pid
        assert container.end(signal.SIGTERM) == -signal.SIGTERM

    def test_replicas_share_no_identity_and_take_free(self, tmp_path: Path, start: Callable[..., Container]) -> None:
        first, second = (start("join", LINK) for _ in range(2))
        homes = {first.said()["home"], second_home := second.said()["home"]}
        assert homes == {str(tmp_path / "volume" / "1"), str(tmp_path / "volume" / "2")}
        second.end()
        assert start("join", LINK).said()["home"] == second_home

    def test_a_restarted_container_may_take_another_identity_than_before(self, tmp_path: Path) -> None:
        home = tmp_path / "home"
        for number in "12":
            load(ENTRYPOINT).point(home, tmp_path / "volume" / number)
            assert home.readlink() == tmp_path / "volume" / number

    def test_an_identity_that_is_named_is_kept(self, tmp_path: Path, start: Callable[..., Container]) -> None:
        said = start("join", LINK, SKIPSTONE_IDENTITY="/keys/mine", SKIPSTONE_ADVERTISE="me").said()
        assert (said["SKIPSTONE_IDENTITY"], said["SKIPSTONE_ADVERTISE"]) == ("/keys/mine", "me")
        assert not (tmp_path / "volume").exists()

    def test_it_waits_for_the_link(self, tmp_path: Path, start: Callable[..., Container]) -> None:
        link = tmp_path / "link"
        container = start("join", SKIPSTONE_LINK=str(link))
        wait_until(lambda: (tmp_path / "volume" / "1" / "lock").exists())
        with pytest.raises(subprocess.TimeoutExpired):
            container.process.wait(0.1)
        link.write_text(LINK)
        assert container.said()["SKIPSTONE_LINK"] == str(link)

    def test_it_does_not_wait_for_ever(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            load(ENTRYPOINT).wait_for(tmp_path / "link", 0.0)
        assert end.value.code == 75
        assert "nobody has written" in capsys.readouterr().err

    def test_the_manifest_is_made_once(self, tmp_path: Path, start: Callable[..., Container]) -> None:
        manifest, run = str(tmp_path / "manifest.toml"), str(tmp_path / "run.toml")
        first = start("join", manifest, SKIPSTONE_RUN=run)
        made = first.said()
        assert made["arguments"] == ["new", manifest, "--from", run]
        assert made["home"] == str(tmp_path / "volume" / "1"), "signed with the identity that the node will have"
        assert first.said()["arguments"] == ["join", manifest]
        first.end()
        assert start("join", manifest, SKIPSTONE_RUN=run).said()["arguments"] == ["join", manifest]
        [invitation] = (tmp_path / "invitation").read_text().splitlines()
        assert json.loads(invitation)["arguments"][:2] == ["invite", manifest]

    def test_a_manifest_that_cannot_be_made_ends_it(self, tmp_path: Path, start: Callable[..., Container]) -> None:
        (tmp_path / "file").touch()
        container = start("join", str(tmp_path / "file" / "manifest.toml"), SKIPSTONE_RUN="run.toml")
        container.said()
        assert container.process.wait(LONG_S) != 0

    def test_other_commands_are_left_alone(self, tmp_path: Path, start: Callable[..., Container]) -> None:
        assert start("status", LINK).said()["arguments"] == ["status", LINK]
        assert not (tmp_path / "volume").exists()

    def test_the_address_that_others_are_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = {"container": "172.18.0.4", "this-machine": "127.0.1.1"}

        def look_up(host: str) -> str:
            if host not in known:
                raise socket.gaierror("no such host")
            return known[host]

        monkeypatch.setattr(socket, "gethostbyname", look_up)
        own_address = load(ENTRYPOINT).own_address
        assert [own_address(host) for host in ("container", "this-machine", "unknown")] == ["172.18.0.4", None, None]


class TestHealthCheck:
    async def test_a_node_that_answers_is_well(self, tmp_path: Path) -> None:
        async with node_at(tmp_path / "identity.key") as port:
            assert await check(tmp_path, port) == (0, "")
            assert await check(tmp_path, port) == (0, ""), "asking leaves nothing behind"

    async def test_without_a_node(self, tmp_path: Path) -> None:
        code, said = await check(tmp_path, 1)
        assert code == 1
        assert "unhealthy" in said

    async def test_without_the_node_s_port(self, tmp_path: Path) -> None:
        async with node_at(tmp_path / "identity.key"):
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
            code, said = await check(tmp_path, port)
        assert (code, "refused" in said) == (1, True)

    async def test_a_port_without_tls(self, tmp_path: Path) -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with node_at(tmp_path / "identity.key"), await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            code, _ = await check(tmp_path, server.sockets[0].getsockname()[1])
        assert code == 1

    def test_a_loop_that_hangs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = load(HEALTH_CHECK)
        monkeypatch.setattr(script, "LIMIT_S", 0.1)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes calls, and nobody answers them
            door = endpoint_path(tmp_path / "identity.key")
            door.write_text(json.dumps({"port": silent.getsockname()[1], "secret": "s"}))
            with pytest.raises(TimeoutError):
                script.ask_event_loop(door)
