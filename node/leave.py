"""How `skipstone leave` reaches the node that runs on this machine.

The node listens on a loopback port and writes the port and a secret beside its identity, in a file that only its owner can read.
Whoever sends the secret there asks it to leave; the connection stays open until it has. Unlike a signal this works on every system,
and unlike a process number the port cannot come to mean another process: that one would not know the secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from swarm.errors import ConfigError, ResourceExhausted, Stalled

LOOPBACK = "127.0.0.1"
SECRET_BYTES = 32
ACCEPTED = b"leaving\n"
CONNECT_S = 5.0
MAX_CONVERSATIONS = 8


@dataclass(frozen=True, slots=True)
class _Door:
    port: int
    secret: str


def door_path(identity_path: Path) -> Path:
    """The file beside the identity that tells how its node is reached."""
    return identity_path.with_name(identity_path.name + ".running")


@asynccontextmanager
async def leave_requests(identity_path: Path, ask: Callable[[], None]) -> AsyncIterator[None]:
    """Within the block, `ask` is called when `skipstone leave` asks for it.

    Raises:
        ResourceExhausted: no loopback port or no file beside the identity could be had.
    """
    secret = secrets.token_hex(SECRET_BYTES)
    talks: set[_Conversation] = set()
    path = door_path(identity_path)
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: _Conversation(secret, ask, talks), LOOPBACK, 0, backlog=MAX_CONVERSATIONS
        )
        _write(path, _Door(server.sockets[0].getsockname()[1], secret))
    except OSError as error:
        raise ResourceExhausted(
            f"the door for `skipstone leave` cannot be opened: {error.strerror or error}"
        ) from error
    try:
        yield
    finally:
        server.close()
        for talk in tuple(talks):
            talk.end()
        _remove_own(path, secret)


async def ask_to_leave(identity_path: Path, patience_s: float) -> None:
    """Asks the node of this identity to leave, and waits until it has.

    Raises:
        ConfigError: no node runs with it on this machine.
        Stalled: it was asked, but is still there after `patience_s` seconds.
    """
    door = _read(door_path(identity_path))
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(LOOPBACK, door.port)
            writer.write(door.secret.encode())
            accepted = await reader.read(len(ACCEPTED)) == ACCEPTED
    except (OSError, TimeoutError):
        raise _nobody(identity_path) from None
    try:
        if not accepted:
            raise _nobody(identity_path)
        async with asyncio.timeout(patience_s):
            with contextlib.suppress(ConnectionError):  # a process that ends may reset its connections
                await reader.read(1)
    except TimeoutError:
        raise Stalled(
            f"the node has been asked to leave, but is still there after {patience_s:.0f} s",
            hint="Look at its log, or end its process.",
        ) from None
    finally:
        writer.close()


class _Conversation(asyncio.Protocol):
    """One connection to the door. Anything but the secret closes it."""

    def __init__(self, secret: str, ask: Callable[[], None], talks: set[_Conversation]) -> None:
        self._secret = secret.encode()
        self._ask = ask
        self._talks = talks
        self._heard = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's
        if len(self._talks) >= MAX_CONVERSATIONS:
            self.end()
        else:
            self._talks.add(self)

    def data_received(self, data: bytes) -> None:
        self._heard += data[: len(self._secret) + 1]
        if len(self._heard) < len(self._secret):
            return
        if hmac.compare_digest(self._heard, self._secret) and self._transport is not None:
            self._transport.write(ACCEPTED)
            self._ask()
        else:
            self.end()

    def connection_lost(self, error: Exception | None) -> None:
        self._talks.discard(self)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _write(path: Path, door: _Door) -> None:
    path.unlink(missing_ok=True)  # of a node that was killed
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"port": door.port, "secret": door.secret}, file)


def _read(path: Path) -> _Door:
    try:
        table = json.loads(path.read_text())
        return _Door(int(table["port"]), str(table["secret"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise _nobody(path.with_name(path.name.removesuffix(".running"))) from None


def _remove_own(path: Path, secret: str) -> None:
    """Unless a later node with the same identity has put its own there."""
    with contextlib.suppress(ConfigError, OSError):
        if _read(path).secret == secret:
            path.unlink()


def _nobody(identity_path: Path) -> ConfigError:
    return ConfigError(
        f"no node is running here with the identity {identity_path}",
        hint="Name the key file that it was started with: skipstone leave --identity FILE.",
    )
