"""The DHT's own process, `python -m protocol.dht.process`, controlled over stdin and stdout (dht_process.proto)."""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import shutil
import sys
from types import ModuleType

from protocol.dht.child import pack, receive
from protocol.generated import dht_process_pb2
from swarm.vocabulary.errors import ConfigError, ProtocolViolation, ResourceExhausted, SkipstoneError
from swarm.vocabulary.types import PeerId, RunId

_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")
_GATHERED_BY_UTILS = {
    "hivemind.utils.logging": ("get_logger",),
    "hivemind.utils.serializer": ("MSGPackSerializer", "SerializerBase"),
    "hivemind.utils.timed_storage": (
        "DHTExpiration",
        "MAX_DHT_TIME_DISCREPANCY_SECONDS",
        "TimedStorage",
        "ValueWithExpiration",
        "get_dht_time",
    ),
}


def import_only_dht() -> None:
    """Prepares an import of hivemind's DHT without the rest, which would import torch (1.6 CPU-seconds, 280 MB)."""
    if "hivemind" in sys.modules:
        return
    found = importlib.util.find_spec("hivemind")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("hivemind is not installed", hint="Install Skipstone's dependencies again.")
    root = found.submodule_search_locations[0]
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [root + name.removeprefix("hivemind").replace(".", "/")]
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    utils = sys.modules["hivemind.utils"]
    for module_name, names in _GATHERED_BY_UTILS.items():
        module = importlib.import_module(module_name)
        for name in names:
            setattr(utils, name, getattr(module, name))


import_only_dht()

from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError  # noqa: E402

from protocol.dht.dht_node import DhtService  # noqa: E402
from protocol.libp2p.daemon import Libp2pStreams  # noqa: E402
from protocol.nat.relay import Attachment, Incoming, OpenTunnels, RelayLimits, RelayService  # noqa: E402

log = logging.getLogger(__name__)

STOP_PATIENCE_S = 1.5  # Then this process ends, and the kernel kills p2pd with it


class _Finished(Exception):
    """Raised to end this process: the node closed our stdin, or p2pd ended."""


class _Work:
    """Executor of the node's requests: has this process's DHT node, relay, relay attachments and tunnels."""

    def __init__(self, service: DhtService, run: RunId, tasks: asyncio.TaskGroup) -> None:
        self._dht = service
        self._streams = Libp2pStreams(service.daemon)
        self._run = run
        self._tasks = tasks
        self._relay: RelayService | None = None
        self._opened = OpenTunnels(run, self._streams.dial, tasks)
        self._incoming = Incoming(("", 0))
        self._attachments: dict[str, tuple[Attachment, asyncio.Task[None]]] = {}

    async def serve_relay(self, start: dht_process_pb2.DhtStart) -> None:
        before = start.relay_before if start.HasField("relay_before") else None
        self._relay = RelayService(self._run, RelayLimits(start.relay_bytes_per_hour), before)
        await self._streams.take(self._relay.serve)

    async def carry_out(self, request: dht_process_pb2.DhtRequest, reply: dht_process_pb2.DhtReply) -> None:
        match request.WhichOneof("kind"):
            case "store":
                await self._dht.store(request.store)
            case "find":
                reply.records.extend(await self._dht.find(list(request.find.keys), wide=request.find.wide))
            case "status":
                await self.describe(reply)
            case "attach":
                self._attach(request.attach)
            case "open_tunnel":
                reply.port = await self._opened.open(request.open_tunnel.relay, PeerId(request.open_tunnel.target))
            case kind:
                reply.failed = f"unexpected request {kind}"

    async def describe(self, reply: dht_process_pb2.DhtReply) -> None:
        reply.situation.CopyFrom(await self._dht.situation())
        if self._relay is not None:
            reply.situation.relay.CopyFrom(self._relay.figures())
        for each, _ in self._attachments.values():
            reply.situation.attachments.add(relay=each.relay, standing=each.standing, reason=each.reason)

    def _attach(self, wish: dht_process_pb2.DhtAttach) -> None:
        """Attaches this peer to the relays in `wish` and detaches it from all others. Raises ProtocolViolation."""
        host, _, port = wish.local.rpartition(":")
        if len(wish.relays) > 4 or (wish.relays and not (host and port.isdecimal())):
            raise ProtocolViolation(f"dht: {len(wish.relays)} relays and {wish.local!r} cannot be attached")
        if wish.relays:
            self._incoming.local = (host.strip("[]"), int(port))
        for relay in self._attachments.keys() - set(wish.relays):
            self._attachments.pop(relay)[1].cancel()
        for relay in dict.fromkeys(wish.relays):
            if relay not in self._attachments:
                attachment = Attachment(relay, self._run, self._streams.dial, self._incoming)
                self._attachments[relay] = (attachment, self._tasks.create_task(attachment.keep()))


class _Desk:
    """Reads the node's requests from stdin and writes replies to stdout, several requests at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._writing = asyncio.Lock()
        self._free = asyncio.Semaphore(32)

    async def serve(self, work: _Work, tasks: asyncio.TaskGroup) -> None:
        while (request := await self.next()) is not None:
            await self._free.acquire()
            tasks.create_task(self._answer(work, request))
        raise _Finished("the node closed the pipe")

    async def next(self) -> dht_process_pb2.DhtRequest | None:
        return await receive(self._reader, dht_process_pb2.DhtRequest)

    async def reply(self, reply: dht_process_pb2.DhtReply) -> None:
        data = pack(reply)
        async with self._writing:
            self._writer.write(data)
            await self._writer.drain()

    async def _answer(self, work: _Work, request: dht_process_pb2.DhtRequest) -> None:
        reply = dht_process_pb2.DhtReply(number=request.number)
        try:
            await work.carry_out(request, reply)
        except Exception as error:
            # hivemind raises arbitrary exceptions for network errors, including AssertionError.
            log.debug("request %d failed", request.number, exc_info=True)
            reply.failed = str(error) or type(error).__name__
        finally:
            self._free.release()
        try:
            await self.reply(reply)
        except ResourceExhausted as error:
            await self.reply(dht_process_pb2.DhtReply(number=request.number, failed=str(error)))
        except ConnectionError:
            raise _Finished("the node has ended") from None


async def _run(desk: _Desk) -> None:
    request = await desk.next()
    if request is None or request.WhichOneof("kind") != "start":
        return
    try:
        await _start_and_serve(desk, request)
    finally:
        shutil.rmtree(request.start.folder, ignore_errors=True)  # the node removes the folder too, unless it was killed


async def _start_and_serve(desk: _Desk, request: dht_process_pb2.DhtRequest) -> None:
    try:
        service = await _start_unless_left(desk, request.start)
    except _Finished:
        return
    except (SkipstoneError, ValueError, P2PDaemonError) as error:
        await desk.reply(dht_process_pb2.DhtReply(number=request.number, failed=str(error)))
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.stay_joined())
            tasks.create_task(_watch_daemon(service))
            work = _Work(service, RunId(request.start.run), tasks)
            if request.start.relay_bytes_per_hour:
                await work.serve_relay(request.start)
            await service.first_join()
            reply = dht_process_pb2.DhtReply(number=request.number)
            await work.describe(reply)
            await desk.reply(reply)
            await desk.serve(work, tasks)
    except* _Finished as finished:
        log.info("stopping: %s", finished.exceptions[0])
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_PATIENCE_S):
                await service.stop()


async def _start_unless_left(desk: _Desk, start: dht_process_pb2.DhtStart) -> DhtService:
    """Starts the DHT node. Raises _Finished if the parent process closes the pipe before the DHT node has started."""
    starting = asyncio.ensure_future(DhtService.start(start))
    leaving = asyncio.ensure_future(desk.next())
    try:
        await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise _Finished("the node has ended")
        return starting.result()
    finally:
        for task in (starting, leaving):
            task.cancel()
        await asyncio.wait({starting, leaving})


async def _watch_daemon(service: DhtService) -> None:
    raise _Finished(f"p2pd ended with code {await service.daemon_ended()}")


async def _main() -> None:
    incoming, outgoing = _claim_pipes()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(incoming, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(outgoing, "wb", 0))
    await _run(_Desk(reader, asyncio.StreamWriter(transport, protocol, None, loop)))


def _claim_pipes() -> tuple[int, int]:
    """Returns copies of stdin and stdout, and redirects the originals: reads are empty, output goes to stderr."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return incoming, outgoing


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(_main())
