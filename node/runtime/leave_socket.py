"""The local socket of a running node: a lock admits one node per identity, and `skipstone leave` or `pause` connect."""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from swarm.vocabulary.errors import ConfigError, IdentityError, ResourceExhausted, Stalled

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
ACCEPTED = b"accepted\n"
CONNECT_S = 5.0
LISTEN_S = 5.0
MAX_CONVERSATIONS = 64  # Beyond this the oldest silent connection is closed, because any local user can open some
LOCK_PATIENCE_S = 2.0
LOCK_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class _Endpoint:
    port: int
    secret: str
    process: int


def endpoint_path(identity_path: Path) -> Path:
    return identity_path.with_name(identity_path.name + ".running")


@asynccontextmanager
async def sole_use(identity_path: Path) -> AsyncIterator[None]:
    """Locks the key file within the block. Raises IdentityError if another node of this machine uses it."""
    try:
        # O_NOFOLLOW: a planted symlink must not lead to another file.
        descriptor = os.open(identity_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise IdentityError(f"cannot open the identity key {identity_path}: {error.strerror or error}") from error
    try:
        await _lock(descriptor, identity_path)
        yield
    finally:
        os.close(descriptor)


@asynccontextmanager
async def leave_requests(
    identity_path: Path, ask: Callable[[], None], others: Mapping[str, Callable[[float | None], None]] | None = None
) -> AsyncIterator[None]:
    """Listens for `skipstone leave` within the block, and for `others`, as `pause 60`. Raises ResourceExhausted."""
    secret = secrets.token_hex(32)
    path = endpoint_path(identity_path)
    silent: dict[asyncio.StreamWriter, None] = {}  # oldest first
    accepted: list[asyncio.StreamWriter] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent[writer] = None
        if len(silent) > MAX_CONVERSATIONS:
            oldest = next(iter(silent))
            del silent[oldest]
            oldest.close()
        said = b""
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(LISTEN_S):
                heard = await reader.readexactly(len(secret))
                if hmac.compare_digest(heard, secret.encode()):  # only a reader of the 0600 file knows the secret
                    said = await reader.readuntil(b"\n")
        silent.pop(writer, None)
        verb, _, seconds = said.decode().strip().partition(" ")
        if verb != "leave" and verb not in (others or {}):
            writer.close()
            return
        accepted.append(writer)
        writer.write(ACCEPTED)
        if others and verb in others:
            others[verb](float(seconds) if seconds else None)
            writer.close()
        else:
            ask()

    try:
        # No request is longer than 128 bytes.
        server = await asyncio.start_server(listen, LOOPBACK, 0, backlog=MAX_CONVERSATIONS, limit=128)
        _write(path, _Endpoint(server.sockets[0].getsockname()[1], secret, os.getpid()))
    except OSError as error:
        raise ResourceExhausted(f"cannot listen for `skipstone leave`: {error.strerror or error}") from error
    try:
        yield
    finally:
        server.close()
        for writer in (*silent, *accepted):
            writer.close()
        with contextlib.suppress(ConfigError, OSError):  # another node may have started with the same identity
            if _read(path).secret == secret:
                path.unlink()


async def ask_to_leave(identity_path: Path, patience_s: float, request: str = "leave") -> None:
    """Asks the node with this key; waits for its end, or for its answer. Raises ConfigError without a node, Stalled."""
    endpoint = _read(endpoint_path(identity_path))
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(LOOPBACK, endpoint.port)
            writer.write(f"{endpoint.secret}{request}\n".encode())
            accepted = await reader.read(len(ACCEPTED)) == ACCEPTED
    except (OSError, TimeoutError):
        raise _nobody(identity_path) from None
    try:
        if not accepted:
            raise _nobody(identity_path)
        # The connection ends with the node's process.
        async with asyncio.timeout(patience_s):
            with contextlib.suppress(ConnectionError):  # an ending process may reset its connections
                await reader.read(1)
    except TimeoutError:
        raise Stalled(
            f"the node was asked to leave, but still runs after {patience_s:.0f} s", hint="Look at its log, or kill it."
        ) from None
    finally:
        writer.close()


async def _lock(descriptor: int, identity_path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    for _ in range(int(LOCK_PATIENCE_S / LOCK_POLL_S)):  # a node that is just leaving may hold the lock for a moment
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(LOCK_POLL_S)
        except OSError as error:
            log.warning("cannot lock %s (%s): make sure that only one node uses it", identity_path, error.strerror)
            return
        else:
            return
    who = ""
    with contextlib.suppress(ConfigError):
        who = f" (process {_read(endpoint_path(identity_path)).process})"
    raise IdentityError(
        f"another node{who} on this machine uses the identity {identity_path}",
        hint="Stop it with `skipstone leave`, or give this node its own key with --identity FILE.",
    )


def _write(path: Path, endpoint: _Endpoint) -> None:
    path.unlink(missing_ok=True)  # left by a killed node
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"port": endpoint.port, "secret": endpoint.secret, "process": endpoint.process}, file)


def _read(path: Path) -> _Endpoint:
    try:
        table = json.loads(path.read_text())
        return _Endpoint(int(table["port"]), str(table["secret"]), int(table["process"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise _nobody(path.with_name(path.name.removesuffix(".running"))) from None


def _nobody(identity_path: Path) -> ConfigError:
    return ConfigError(
        f"no node runs here with the identity {identity_path}", hint="Name its key file: leave --identity FILE."
    )
