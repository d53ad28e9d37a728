"""A swarm of node processes on this machine, for `skipstone up`, benchmarks and tests."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, Self

from node.local_swarm.child_process import ChildEnd, ChildProcess, SpawnedProcess
from node.local_swarm.forked_nodes import ForkServer, may_fork
from node.local_swarm.setup import Deployments, LocalSetup, LocalSwarmOptions, PlannedPeer, all_local, node_command
from node.local_swarm.swarm_progress import Progressed, SwarmProgress, apply, noted, peer_exited, peer_started
from node.observability.event_json import event_from_json
from node.observability.events import Event, Note
from protocol.manifest.join_link import JoinLink
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, ProtocolViolation, ResourceExhausted, SkipstoneError
from swarm.vocabulary.types import ModuleId, short

STOP_LIMIT_S = 20.0  # Limit of a node's clean stop, in seconds
MAX_UNREAD_EVENTS = 10_000


class LocalSwarm:
    """A local swarm whose nodes run within `async with`. `events()` is for one reader; unread events are limited."""

    def __init__(
        self,
        manifest: Manifest,
        options: LocalSwarmOptions,
        *,
        command: Sequence[str] | None = None,
        deployments: Deployments = all_local,
        stop_limit_s: float = STOP_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`command` replaces `python -m node`; by default nodes are forked if possible, in half the time."""
        self._manifest, self._options, self._deployments = manifest, options, deployments
        self._stop_limit_s, self._clock = stop_limit_s, clock
        self._command = tuple(command or node_command())
        self._may_fork = command is None and may_fork(self._command)
        self._forks: ForkServer | None = None
        self._children: dict[int, ChildProcess] = {}
        self._unread: deque[Event] = deque(maxlen=MAX_UNREAD_EVENTS)
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._nodes: dict[int, asyncio.Task[None]] = {}
        modules = tuple(map(str, manifest.modules())) if manifest.stages.has_experts else ()
        self.progress = SwarmProgress(stages=manifest.stages.count, target=options.steps, modules=modules)
        self.ends: dict[int, ChildEnd] = {}

    async def __aenter__(self) -> Self:
        """Starts the nodes. Raises ConfigError for too few peers, ResourceExhausted."""
        self._setup = LocalSetup(self._manifest, self._options, self._deployments)
        if self._may_fork:
            self._forks = ForkServer(self._setup.environment())
        await self._tasks.__aenter__()
        self._tasks.create_task(self._stop_when_asked())
        for peer in tuple(self._setup.peers):
            self._start(peer)
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.request_stop()
        if error is not None:
            self.kill_all()
        cancelled = (kind, error, trace) if isinstance(error, asyncio.CancelledError) else (None, None, None)
        try:
            await self._tasks.__aexit__(*cancelled)  # the task group would wrap other exceptions of the block
        finally:
            if self._forks is not None:
                self._forks.close()
            self._setup.remove()

    @property
    def link(self) -> JoinLink:
        return self._setup.link

    @property
    def peers(self) -> tuple[PlannedPeer, ...]:
        return tuple(self._setup.peers)

    def processes(self) -> dict[int, int]:
        return {index: child.pid for index, child in self._children.items()}

    async def events(self) -> AsyncIterator[Event]:
        """Yields the swarm's events (see `swarm_progress`) until no node is left."""
        while True:
            while self._unread:
                yield self._unread.popleft()
            if not self._nodes:
                return
            self._changed.clear()
            await self._changed.wait()

    def start_peer(self, stage: int, command: Sequence[str] | None = None, expert: int = 0) -> int:
        """Starts one more node for a module; returns its index. Raises ConfigError, SkipstoneError."""
        if not 0 <= stage < self._manifest.stages.count:
            raise ConfigError(f"stage {stage} is not one of 0 to {self._manifest.stages.count - 1}")
        if not self._manifest.has(ModuleId(stage, expert)):
            raise ConfigError(f"stage {stage} has no expert {expert}")
        if self._stopping.is_set():
            raise SkipstoneError("cannot start a peer: the swarm is stopping")
        peer = self._setup.add(ModuleId(stage, expert))
        self._start(peer, command)
        return peer.index

    def restart_peer(self, index: int) -> None:
        """Restarts an ended node with its identity, ports and checkpoints. Raises SkipstoneError."""
        if index in self._nodes or self._stopping.is_set():
            raise SkipstoneError(f"cannot restart peer {index}: it still runs, or the swarm is stopping")
        del self.ends[index]
        self._setup.ended.discard(index)
        self._setup.returned.add(index)
        self._start(self._setup.peers[index])

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to a node and its children, as if its machine failed."""
        if index in self._children:
            self._children[index].signal_group(number)

    def terminate(self, index: int) -> None:
        """Sends SIGTERM to a node's process, not to its children, as a service manager does."""
        if index in self._children:
            self._children[index].terminate()

    def request_stop(self) -> None:
        """Asks every node to stop, and kills nodes that still run after the limit. Returns at once."""
        self._stopping.set()

    def kill_all(self) -> None:
        self._stopping.set()
        self.signal_all(signal.SIGKILL)

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to every node. Touches no event loop, so a signal handler may call it."""
        for child in tuple(self._children.values()):
            child.signal_group(number)

    async def stop(self) -> None:
        self.request_stop()
        while self._nodes:
            await asyncio.wait(self._nodes.values())

    def _start(self, peer: PlannedPeer, command: Sequence[str] | None = None) -> None:
        self.progress = peer_started(self.progress, peer.index, peer.stage, peer.peer)
        task = self._tasks.create_task(self._run(peer, command), name=f"peer-{peer.index}")
        self._nodes[peer.index] = task
        task.add_done_callback(lambda _: self._gone(peer.index))

    def _gone(self, index: int) -> None:
        del self._nodes[index]
        self._changed.set()

    async def _run(self, peer: PlannedPeer, command: Sequence[str] | None) -> None:
        try:
            own, words = command or peer.deployment.command, self._setup.arguments(peer)
            forked = await self._forks.start(words) if self._forks is not None and own is None else None
            child = ChildProcess(forked or SpawnedProcess((*(own or self._command), *words), self._setup.environment()))
        except ResourceExhausted as error:
            self._ended(peer, ChildEnd(error.exit_code, (str(error),)))
            return
        self._children[peer.index] = child
        if self._stopping.is_set():
            child.ask_to_stop()  # asked to stop while this node was starting
        try:
            end = await child.follow(lambda line: self._heard(peer, line))
        finally:
            del self._children[peer.index]
        self._ended(peer, end)

    def _ended(self, peer: PlannedPeer, end: ChildEnd) -> None:
        self.ends[peer.index] = end
        self._setup.ended.add(peer.index)
        self._take(peer_exited(self.progress, peer.index, end.exit_code))
        if not end.exit_code:  # no other event may follow to show that the run is over
            self._note("info", f"{_name(peer)} stopped cleanly")
            return
        self._note("error", f"{_name(peer)} ended with exit code {end.exit_code}")
        for line in end.stderr[-5:]:
            self._note("error", f"{_name(peer)}: {line}")

    def _heard(self, peer: PlannedPeer, line: bytes) -> None:
        try:
            event = event_from_json(line)
        except ProtocolViolation as error:
            self._note("warning", f"{_name(peer)}: {error}")
            return
        if event is not None and peer.stages is not None and getattr(event, "peer", peer.peer) != peer.peer:
            self._take(Progressed(self.progress, (event,)))  # of a further module of this node
        elif event is not None:
            self._take(apply(self.progress, peer.index, event, self._clock()))

    def _note(self, level: Literal["info", "warning", "error"], message: str) -> None:
        self._take(noted(self.progress, Note(level, message), self._clock()))

    def _take(self, progressed: Progressed) -> None:
        self.progress = progressed.state
        self._unread.extend(progressed.events)
        self._changed.set()

    async def _stop_when_asked(self) -> None:
        await self._stopping.wait()  # data nodes first: their microbatches in flight still need the other nodes
        data_nodes = {peer.index for peer in self.peers if peer.stage == 0}
        await self._ask_to_stop(data_nodes, self._stop_limit_s / 2)
        # A drain, the end of a round and a last record may take a stage peer most of the limit.
        await self._ask_to_stop(set(self._nodes), self._stop_limit_s)
        self.kill_all()

    async def _ask_to_stop(self, indices: set[int], patience_s: float) -> None:
        """Asks these nodes to stop, and waits for them."""
        for index in indices & self._children.keys():
            self._children[index].ask_to_stop()
        tasks = [self._nodes[index] for index in indices if index in self._nodes]
        if tasks:
            await asyncio.wait(tasks, timeout=patience_s)


def _name(peer: PlannedPeer) -> str:
    return f"peer {short(peer.peer)} (stage {peer.stage})"
