"""One DHT child process, managed by the node: start, requests, stop, clean-up."""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from protocol.frames.codec import Parsed, parsed
from protocol.generated import dht_process_pb2
from protocol.identity.keys import Identity
from protocol.libp2p.child_process import with_packages
from swarm.vocabulary.errors import ConfigError, ProtocolViolation, ResourceExhausted, SkipstoneError, Unreachable

MAX_MESSAGE_BYTES = 16 * 2**20
KEYS_PER_FIND = 16  # 16 full keys (256 records of 2 KiB) are 8 MiB
_LENGTH_BYTES = 4


def pack(message: Message) -> bytes:
    """Serialises a message with a length prefix. Raises ResourceExhausted above MAX_MESSAGE_BYTES."""
    data: bytes = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ResourceExhausted(f"dht: a message of {len(data)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def receive(reader: asyncio.StreamReader, into: type[Parsed]) -> Parsed | None:
    """Reads the next message of type `into`; None once the pipe is closed. Do not read after a ProtocolViolation."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolViolation(f"dht: a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
        data = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return parsed(into, data, "dht: the bytes on the pipe are not a message")


log = logging.getLogger(__name__)

STOP_PATIENCE_S = 2.0
MAX_WAITING_REQUESTS = 64
MAX_SOCKET_BYTES = 103 if sys.platform == "darwin" else 107
_MAX_LINE = 500
_IDENTITY_FILE = "identity"
_SOURCES = Path(__file__).resolve().parents[2]


class DhtChild:
    """A running DHT child process, created by `running_child`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[dht_process_pb2.DhtReply]] = {}
        self._numbers = itertools.count(1)
        self._last_lines: deque[str] = deque(maxlen=5)
        self.ended = asyncio.Event()  # Set when the child has ended or closed its side

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def ask(self, request: dht_process_pb2.DhtRequest, timeout_s: float) -> dht_process_pb2.DhtReply:
        """Sends a request to the child and waits for the reply. Raises Unreachable without a successful reply."""
        if self.ended.is_set():
            raise Unreachable("the DHT process has ended")
        if len(self._waiting) >= MAX_WAITING_REQUESTS:
            raise Unreachable(f"the DHT has {MAX_WAITING_REQUESTS} open requests already")
        request.number = next(self._numbers)
        reply: asyncio.Future[dht_process_pb2.DhtReply] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = reply
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(request)
                answered = await reply
        except TimeoutError:
            raise Unreachable(f"the DHT did not answer within {timeout_s:.0f} s") from None
        finally:
            del self._waiting[request.number]
        if answered.failed:
            raise Unreachable(f"DHT: {answered.failed[:_MAX_LINE]}")
        return answered

    async def _send(self, request: dht_process_pb2.DhtRequest) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pack(request))
            await self._process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise Unreachable("the DHT process has closed its pipe") from error

    async def hand_out_replies(self) -> None:
        """Reads the child's replies and completes the waiting requests. Fails open requests when the child ends."""
        assert self._process.stdout is not None
        try:
            while (reply := await receive(self._process.stdout, dht_process_pb2.DhtReply)) is not None:
                waiting = self._waiting.get(reply.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except ProtocolViolation as violation:
            log.warning("the DHT process broke its protocol: %s", violation)
        finally:
            self.ended.set()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unreachable("the DHT process has ended"))

    async def pass_on_its_log(self) -> None:
        """Logs the child's output at debug level, because hivemind and p2pd write a lot."""
        assert self._process.stderr is not None
        rest = b""
        while chunk := await self._process.stderr.read(4096):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-_MAX_LINE:]
            for line in lines:
                text = line.decode(errors="replace")[:_MAX_LINE].rstrip()
                self._last_lines.append(text)
                log.debug("dht: %s", text)

    def last_words(self) -> str:
        return "; ".join(self._last_lines)

    async def stop(self) -> None:
        """Asks the child to end by closing its stdin, and waits up to STOP_PATIENCE_S. Call `end` afterwards."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            async with asyncio.timeout(STOP_PATIENCE_S):
                await self._process.wait()
        except TimeoutError:
            log.info("the DHT process did not stop within %.0f s; it is killed", STOP_PATIENCE_S)

    async def end(self) -> None:
        """Kills all remaining processes of the child's process group and waits until the child's pipes are closed."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_PATIENCE_S):
                await self._process.communicate()


def socket_parent() -> str:
    """Returns the folder below which p2pd's unix sockets have names of an allowed length. Raises ConfigError."""
    limit = MAX_SOCKET_BYTES - len("/skipstone-12345678/p2pclient-12345678901.sock")
    for parent in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):  # noqa: S108 - mkdtemp is safe
        if parent and len(os.fsencode(parent)) <= limit and os.access(parent, os.W_OK | os.X_OK):
            return parent
    raise ConfigError(
        f"no folder for the DHT's unix sockets: the names of TMPDIR, XDG_RUNTIME_DIR and the system's folder have more"
        f" than {limit} bytes, or they cannot be written",
        hint="Set TMPDIR to a folder with a shorter name.",
    )


@contextlib.asynccontextmanager
async def running_child(
    start: dht_process_pb2.DhtStart, identity: Identity
) -> AsyncIterator[tuple[DhtChild, dht_process_pb2.DhtSituation]]:
    """Starts a DHT process, yields it with the state of its DHT node, and stops it. Raises ConfigError, Unreachable."""
    # The key is passed in a private file, which is removed as soon as p2pd has read it.
    folder = Path(tempfile.mkdtemp(prefix="skipstone-", dir=socket_parent()))
    try:
        key_file = folder / _IDENTITY_FILE
        key_file.touch(0o600, exist_ok=False)
        key_file.write_bytes(identity.libp2p_private_key())
        start.folder, start.identity = str(folder), _IDENTITY_FILE
        async with _process() as child:
            try:
                reply = await child.ask(dht_process_pb2.DhtRequest(start=start), start.timeout_s)
            except Unreachable as error:
                raise ConfigError(
                    f"the DHT did not start: {error} ({child.last_words()})",
                    hint="Check that the address can be listened on and that the port is free.",
                ) from error
            finally:
                key_file.unlink(missing_ok=True)
            yield child, reply.situation
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def _process() -> AsyncIterator[DhtChild]:
    child = DhtChild(await _started())
    failure: SkipstoneError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(child.hand_out_replies()), tasks.create_task(child.pass_on_its_log())]
            try:
                yield child
            except SkipstoneError as error:
                failure = error  # raised below, outside the group, which would wrap it
            finally:
                await child.stop()
                for reader in readers:
                    reader.cancel()
    finally:
        await _done(asyncio.ensure_future(child.end()))
    if failure is not None:
        raise failure


async def _started() -> asyncio.subprocess.Process:
    """Starts `protocol.dht.process` as a subprocess, and kills the subprocess if this task is cancelled meanwhile."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # do not import from the current folder
            "-m",
            "protocol.dht.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=with_packages({"HIVEMIND_LOGLEVEL": "WARNING", **os.environ}, str(_SOURCES)),
            # a process group to kill, without Ctrl-C from the terminal, so that we stop it in order
            start_new_session=True,
        )
    )
    try:
        await _done(starting)
    except asyncio.CancelledError:
        if starting.exception() is None:
            await _done(asyncio.ensure_future(DhtChild(starting.result()).end()))
        raise
    return starting.result()


async def _done(short: asyncio.Future[Any]) -> None:
    """Waits until `short` is done even if this task is cancelled, then raises the cancellation."""
    # A second cancellation would stop asyncio's clean-up after the first one and leak the process and its pipes.
    cancelled = None
    while not short.done():
        try:
            await asyncio.wait((short,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
