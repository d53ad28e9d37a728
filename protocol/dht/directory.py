"""Directory of a run's peers, on hivemind's DHT in a supervised child process (`protocol.dht.process`)."""

import asyncio
import dataclasses
import ipaddress
import logging
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from protocol.dht.child import KEYS_PER_FIND, DhtChild, running_child
from protocol.generated import dht_process_pb2
from protocol.identity.keys import Identity
from protocol.identity.signed_records import decode_announced, directory_key
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import Contact
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import ConfigError, ProtocolViolation, ResourceExhausted, SkipstoneError, Unreachable
from swarm.vocabulary.statistics import Latest
from swarm.vocabulary.types import MAX_EXPERTS, MAX_STAGES, ModuleId, PeerId, RunId, short

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
HEARTBEAT_TIMEOUT_S = 10.0
RESTART_PAUSE_S = (0.1, 30.0)  # First and longest pause; doubled each time, with up to 50 % jitter
MAX_REMEMBERED_PEERS = 8192


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """Settings of this peer's DHT node: addresses, initial peers, relay limit and timeouts."""

    # Address to listen on; empty for a client that only queries
    host: str = "0.0.0.0"  # noqa: S104  # other machines connect to it
    port: int = 0  # 0: any free port, kept over restarts of the DHT
    announce: tuple[str, ...] = ()  # Multiaddrs to announce, for a forwarded port
    initial_peers: tuple[str, ...] = ()  # Multiaddrs `/ip4/.../tcp/.../p2p/12D3Koo...`; none for a swarm's first node
    client: bool = False  # Stores no records for others and answers no queries
    relay_bytes_per_hour: int = 0  # 0: no relay
    # Modules of each stage; records of other modules are not stored
    experts: tuple[int, ...] = (1, *(MAX_EXPERTS for _ in range(1, MAX_STAGES)))
    startup_timeout_s: float = 60.0
    publish_timeout_s: float = 15.0
    look_up_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        try:
            if self.host or not self.client:
                ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(f"--listen {self.host!r} is not an IP address, such as 0.0.0.0 or ::") from None


class LatestSequences:
    """Sequence number of each peer's newest unexpired record, so that older records are refused."""

    # Forgotten at expiry, so that a peer whose clock was far ahead can correct it.

    def __init__(self, limit: int = MAX_REMEMBERED_PEERS) -> None:
        self._latest = Latest[PeerId, tuple[int, float]](limit)

    def is_current(self, announcement: Announcement, now: float) -> bool:
        """Whether we know no newer unexpired record of this peer at `now` (Unix time). If so, remembers this record."""
        sequence, expires_at = self._latest.get(announcement.peer, (0, 0.0))
        if announcement.sequence < sequence and now < expires_at:
            return False
        self._latest[announcement.peer] = announcement.sequence, announcement.expires_at
        return True


class DhtDirectory:
    """Directory of a run's peers, an async context manager. Methods raise Unreachable while the DHT restarts."""

    def __init__(self, settings: DirectorySettings, identity: Identity, run: RunId, clock: Clock) -> None:
        self._settings, self._identity, self._run, self._clock = settings, identity, run, clock
        self._tasks = asyncio.TaskGroup()
        self._supervisor: asyncio.Task[None] | None = None
        self._child: DhtChild | None = None
        self.situation = dht_process_pb2.DhtSituation()
        self.port = settings.port
        self.restarts = -1  # The first start makes it 0
        self._kept: dict[str, dht_process_pb2.DhtRequest] = {}
        self._sequences = LatestSequences()

    async def __aenter__(self) -> Self:
        """Starts the DHT process, which tries its initial peers once. Raises ConfigError if it cannot start."""
        await self._tasks.__aenter__()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor = self._tasks.create_task(self._supervise(started))
        try:
            await started
        except BaseException:
            self._supervisor.cancel()
            await self._tasks.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        assert self._supervisor is not None
        self._supervisor.cancel()
        cancelled = (kind, error, traceback) if isinstance(error, asyncio.CancelledError) else (None, None, None)
        await self._tasks.__aexit__(*cancelled)  # do not wrap other errors of the caller in a group

    async def publish(self, announcement: Announcement, record: bytes) -> None:
        """Stores a signed record of us, or of a peer of this process, under its module's key. Raises Unreachable."""
        store = dht_process_pb2.DhtStore(
            key=directory_key(announcement.run, announcement.module),
            owner=announcement.peer,
            record=record,
            expires_at=announcement.expires_at,
        )
        await self.keep(f"record of {announcement.peer}", dht_process_pb2.DhtRequest(store=store))

    async def look_up(self, modules: Sequence[ModuleId], *, wide: bool = True) -> list[Announcement]:
        """Finds the newest records of these modules' replicas and of peers without a module. Raises Unreachable."""
        # `wide` asks all nodes near each key, which costs some twenty times as much.
        child = self._running()
        keys = [directory_key(self._run, module) for module in (None, *dict.fromkeys(modules))]
        records: list[bytes] = []
        for start in range(0, len(keys), KEYS_PER_FIND):
            find = dht_process_pb2.DhtFind(keys=keys[start : start + KEYS_PER_FIND], wide=wide)
            reply = await child.ask(dht_process_pb2.DhtRequest(find=find), self._settings.look_up_timeout_s)
            records += reply.records
        now = self._clock.wall()
        valid = await asyncio.to_thread(self._decoded, records, now)
        newest: dict[PeerId, Announcement] = {}
        for announcement in sorted(valid, key=lambda each: -each.sequence):
            if self._sequences.is_current(announcement, now):
                newest.setdefault(announcement.peer, announcement)
        return list(newest.values())

    async def ask(self, request: dht_process_pb2.DhtRequest, timeout_s: float) -> dht_process_pb2.DhtReply:
        """Sends a request to the DHT process and waits for the reply. Raises Unreachable."""
        return await self._running().ask(request, timeout_s)

    async def keep(self, name: str, request: dht_process_pb2.DhtRequest) -> None:
        """Sends a request now and after each restart of the DHT, until another request of this name replaces it."""
        self._kept[name] = request
        await self.ask(request, self._settings.publish_timeout_s)

    def take_part(self, *, client: bool) -> None:
        """Makes this a client (which only queries) or a full DHT node. A change restarts the DHT; its tunnels end."""
        self._settings = dataclasses.replace(self._settings, client=client)

    @property
    def serves_tunnels(self) -> bool:
        return self._settings.relay_bytes_per_hour > 0

    def multiaddrs(self) -> list[str]:
        """Returns the multiaddrs of this DHT node, with its peer id, for a join link."""
        return list(self.situation.multiaddrs)

    @property
    def process_id(self) -> int | None:
        """Process id of the DHT process, for diagnosis; None while it is not running."""
        return None if self._child is None else self._child.process_id

    def _running(self) -> DhtChild:
        if self._child is None:
            raise Unreachable("the DHT is being restarted", hint="Try again in a moment.")
        return self._child

    def _decoded(self, records: Sequence[bytes], now: float) -> list[Announcement]:
        valid: list[Announcement] = []
        for record in records:
            try:
                valid.append(decode_announced(record, run=self._run, now=now, is_verified=True))
            except ProtocolViolation as violation:
                log.debug("ignoring a record from the DHT: %s", violation)
        return valid

    async def _supervise(self, started: asyncio.Future[None]) -> None:
        pause_s, longest_s = RESTART_PAUSE_S
        while True:
            began = self._clock.monotonic()
            try:
                await self._live_once(started)
            except (SkipstoneError, OSError) as error:
                if not started.done():
                    ours = isinstance(error, SkipstoneError)
                    reason = f"the DHT process could not be started: {error}"
                    started.set_exception(error if ours else ResourceExhausted(reason))
                    return
                level = logging.INFO if isinstance(error, _TakesPartAnew) else logging.WARNING
                log.log(level, "the DHT has to be restarted: %s", error)
            if self._clock.monotonic() - began > 60.0:
                pause_s = RESTART_PAUSE_S[0]
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  # not a secret
            pause_s = min(longest_s, pause_s * 2)

    async def _live_once(self, started: asyncio.Future[None]) -> None:
        """Runs a DHT process until it fails; first repeats the requests of `keep`. Raises ConfigError, Unreachable."""
        start = self._start_message()
        async with running_child(start, self._identity) as (child, situation):
            self.situation = situation
            ports = re.findall(r"/tcp/(\d+)", " ".join(situation.multiaddrs))
            self.port = self.port or int(ports[0] if ports else 0)
            self.restarts += 1
            self._child = child
            try:
                if not started.done():
                    started.set_result(None)
                await self._ask_again(child)
                await self._watch(child, start.client)
            finally:
                self._child = None

    async def _watch(self, child: DhtChild, client: bool) -> None:
        """Polls the DHT process. Raises Unreachable if it ended, is silent, or must become a client or full node."""
        while True:
            if client != self._settings.client:
                raise _TakesPartAnew(f"it is now a {'full node' if client else 'client'}")
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await child.ended.wait()
            except TimeoutError:
                status = dht_process_pb2.DhtRequest(status=dht_process_pb2.DhtStatus())
                self.situation = (await child.ask(status, HEARTBEAT_TIMEOUT_S)).situation
            else:
                raise Unreachable(f"the DHT process has ended ({child.last_words()})")

    async def _ask_again(self, child: DhtChild) -> None:
        for name, request in list(self._kept.items()):
            if request.WhichOneof("kind") == "store" and request.store.expires_at <= self._clock.wall():
                continue
            try:
                await child.ask(request, self._settings.publish_timeout_s)
            except Unreachable as error:
                log.info("our %s is not restored yet: %s", name, error)

    def _start_message(self) -> dht_process_pb2.DhtStart:
        settings = self._settings
        return dht_process_pb2.DhtStart(
            peer=self._identity.peer,
            run=self._run,
            experts=settings.experts,
            host=settings.host,
            port=self.port,
            announce=settings.announce,
            initial_peers=settings.initial_peers,
            client=settings.client,
            timeout_s=settings.startup_timeout_s,
            relay_bytes_per_hour=settings.relay_bytes_per_hour,
            relay_before=self.situation.relay if self.situation.HasField("relay") else None,
        )


class _TakesPartAnew(Unreachable):
    pass


MAX_ATTACHED: Final = 2
OPEN_S: Final = 16.0  # Timeout per relay, for the dial and the far end's acceptance


@dataclass(frozen=True, slots=True, eq=False)
class RelayTunnels:
    """Tunnels through relays, in both directions. `relay_of` returns the multiaddr of a peer's relay, or ""."""

    directory: DhtDirectory
    relay_of: Callable[[PeerId], str]
    shuffle: Callable[[list[str]], None] = random.shuffle

    async def way_to(self, contact: Contact) -> str:
        """Opens a tunnel. Returns a local `host:port`, which takes one connection within 10 s. Raises Unreachable."""
        relays = [relay for peer in contact.via if (relay := self.relay_of(peer))]
        if not relays:
            raise Unreachable(f"{short(contact.peer)} has no known relay")
        self.shuffle(relays)
        reasons = []
        for relay in relays[:MAX_ATTACHED]:
            wish = dht_process_pb2.DhtOpenTunnel(relay=relay, target=contact.peer)
            try:
                reply = await self.directory.ask(dht_process_pb2.DhtRequest(open_tunnel=wish), OPEN_S)
            except Unreachable as error:
                log.info("no tunnel to %s through %s: %s", short(contact.peer), relay, error)
                reasons.append(f"{relay}: {error}")
            else:
                return f"127.0.0.1:{reply.port}"
        raise Unreachable(f"no tunnel to {short(contact.peer)}: {'; '.join(reasons)}")

    async def attach(self, relays: Sequence[str], local: str) -> None:
        """Attaches to the first two relays in the background; they forward tunnels to `local`. Raises Unreachable."""
        attach = dht_process_pb2.DhtAttach(relays=relays[:MAX_ATTACHED], local=local)
        await self.directory.keep("attachments", dht_process_pb2.DhtRequest(attach=attach))

    def attachments(self) -> Sequence[dht_process_pb2.DhtAttachment]:
        """Returns the state of each relay attachment requested by `attach`, as of the last heartbeat (every 2 s)."""
        return self.directory.situation.attachments

    def carried(self) -> dict[str, int]:
        """Returns the `DhtRelayFigures` of the traffic that this node relayed, as of the last heartbeat."""
        relay = self.directory.situation.relay
        return {field.name: getattr(relay, field.name) for field in relay.DESCRIPTOR.fields}
