"""A node on an emulated machine in an emulated place: `python -m tests.e2e.emulated SPEC join ...`, as `skipstone`.

A computation takes as long as on the emulated machine (the compute thread sleeps), frames arrive later, a data node may
choose paths by another rule and record its microbatches. The directory (DHT) is not slowed down.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import node.pipeline.admission
import node.runtime.role
import node.runtime.serving
from lab.world.arms import OURS, RulePlanner, SwarmPlanner, planner_of
from node.__main__ import main
from node.averaging.anchor.anchor import Anchor
from node.context.module_context import ModuleContext
from node.pipeline.runner import Job, Output
from node.pipeline.worker import DataWorker, HopWorker
from node.runtime.role import DataRole, data_role
from protocol.frames.frames import Hello
from protocol.manifest.manifest import Manifest
from protocol.transport.grpc_streams import AcceptedStream, DialledStream
from protocol.transport.grpc_transport import GrpcTransport
from swarm.membership.membership import Membership
from swarm.pipeline.custody import Event, Started, Work
from swarm.routing.measured_times import MeasuredTimes
from swarm.routing.path_rules import PathRules
from swarm.routing.planner import Planner
from swarm.vocabulary.errors import ConfigError, ProtocolViolation
from swarm.vocabulary.pipeline_messages import Purpose, Receipt
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from swarm.vocabulary.types import Path as HopPath
from swarm.workload.microbatch_sizes import Size, VisitCost
from tests.e2e.small_run import HOME, LAUNCHED, LOST, FlightWriter, whole_lines

Written = Callable[[float, float], None]
REPLAY = "replay"
"""The rule that repeats the routes of the network's file."""


@dataclass(frozen=True, slots=True)
class Spec:
    forward_s: float
    network: str
    backward_factor: float = 2.0
    bytes_per_s: float | None = None
    rule: str = OURS
    window: int | None = None
    slots: int | None = None
    announced_factor: float = 1.0
    flights: str | None = None
    computed: str | None = None
    seed: int = 0
    loss_factor: float | None = None  # None: both passes
    one_line: bool = False  # All links of the node share `bytes_per_s`, as at home

    @property
    def visit_s(self) -> float:
        return (1 + self.backward_factor) * self.forward_s

    def compute_s(self, work: Work) -> float:
        """Of one computation, by a machine that is as fast as ever."""
        backward = self.backward_factor
        factors = {Work.FORWARD: 1.0, Work.BACKWARD: backward, Work.REPLAY: 1.0 + backward, Work.LOSS: 1.0 + backward}
        if self.loss_factor is not None:
            factors[Work.LOSS] = self.loss_factor
        return factors[work] * self.forward_s

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Network:
    region_of: dict[str, str]
    one_way_s: dict[str, dict[str, float]]
    routes: dict[str, list[list[str]]] = field(default_factory=dict)  # of each data node, for the rule REPLAY

    def between(self, one: PeerId, other: PeerId) -> float:
        """0 to and from who has no place: somebody who only asks."""
        if one not in self.region_of or other not in self.region_of:
            return 0.0
        return self.one_way_s[self.region_of[one]][self.region_of[other]]

    def write(self, path: Path) -> None:
        half = path.with_suffix(".part")
        half.write_text(json.dumps(asdict(self)))
        half.rename(path)

    @classmethod
    def read(cls, path: Path) -> Network:
        """Raises ConfigError when it has not been written."""
        try:
            return cls(**json.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(f"network {path}: {error.strerror}") from None


def slow_computing(spec: Spec) -> None:
    """Every computation takes its emulated time, unless it really takes longer. The announced speed is the emulated
    one, times the specification's factor."""
    written = None if spec.computed is None else _writer(Path(spec.computed))
    HopWorker.compute = lasting(HopWorker.compute, spec, written)  # type: ignore[method-assign]
    DataWorker.compute = lasting(DataWorker.compute, spec)  # type: ignore[method-assign]

    def announced(tokens: int) -> float:
        return spec.announced_factor * tokens / spec.visit_s

    def timed(self: HopWorker, size: Size, seconds: float) -> None:
        self._cost = VisitCost()
        self._cost.add(size.tokens, size.tokens / announced(size.tokens))

    def measured(passes: object, manifest: Manifest, device: object) -> float:
        return announced(manifest.microbatch_tokens)

    HopWorker._timed = timed  # type: ignore[method-assign]
    node.pipeline.worker.measure_speed = measured


def _writer(path: Path) -> Written:
    file = path.open("a", buffering=1)
    return lambda begun, seconds: print(begun, seconds, file=file)


def read_computed(path: Path) -> list[tuple[float, float]]:
    """When each computation began, by the monotonic clock, and its emulated seconds; none where nobody wrote."""
    return [(float(begun), float(seconds)) for begun, seconds in map(str.split, whole_lines(path))]


def lasting(honestly: Callable[[Any, Job], Output], spec: Spec, written: Written | None = None) -> Any:
    """A computation that takes its emulated time, or longer if it really does."""

    def compute(self: object, job: Job) -> Output:
        begun, seconds = time.monotonic(), spec.compute_s(job.work)
        output = honestly(self, job)
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        if written is not None:
            written(begun, seconds)
        return output

    return compute


def slow_links(spec: Spec) -> None:
    """Frames come as late as the network says. Both Hellos come at once: who is there is not known before."""
    shared = Line(spec.bytes_per_s)
    for kind in (DialledStream, AcceptedStream):
        _make_late(kind, (lambda: shared) if spec.one_line else lambda: Line(spec.bytes_per_s))
    honestly = GrpcTransport._link

    def link(self: GrpcTransport, peer: PeerId, stream: Any, hello: Hello) -> Any:
        stream.late.delay_s = Network.read(Path(spec.network)).between(self._peer, peer)
        return honestly(self, peer, stream, hello)

    GrpcTransport._link = link  # type: ignore[method-assign]


STAMP = struct.Struct("<d")


@dataclass(slots=True)
class Line:
    bytes_per_s: float | None
    free_at: float = 0.0


@dataclass(slots=True)
class LateFrames:
    """One end of one stream: a line of `bytes_per_s` at most, then a delay that frames under way share."""

    line: Line
    delay_s: float = 0.0

    async def leave(self, frame: bytes) -> bytes:
        line = self.line
        if line.bytes_per_s is not None:
            line.free_at = max(line.free_at, time.monotonic()) + len(frame) / line.bytes_per_s
            await asyncio.sleep(max(0.0, line.free_at - time.monotonic()))
        return STAMP.pack(time.monotonic()) + frame

    async def arrive(self, stamped: bytes) -> bytes:
        """Raises ProtocolViolation."""
        if len(stamped) < STAMP.size:
            raise ProtocolViolation("a frame without a stamp: the other node is not emulated")
        (sent,) = STAMP.unpack_from(stamped)
        wait = sent + self.delay_s - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        return stamped[STAMP.size :]


def _make_late(kind: Any, line: Callable[[], Line]) -> None:
    make, read, write = kind.__init__, kind.read, kind.write

    def init(self: Any, *arguments: object) -> None:
        make(self, *arguments)
        self.late = LateFrames(line())

    async def read_late(self: Any) -> bytes | None:
        frame = await read(self)
        return None if frame is None else await self.late.arrive(frame)

    async def write_stamped(self: Any, frame: bytes) -> None:
        await write(self, await self.late.leave(frame))

    kind.__init__, kind.read, kind.write = init, read_late, write_stamped


class Listener(Protocol):
    """Observes the microbatches of a data node."""

    def launched(self, microbatch: MicrobatchId, path: HopPath, now: float) -> None: ...

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None: ...

    def ended(self, microbatch: MicrobatchId, path: HopPath | None) -> None:
        """`path` is None when it is lost."""
        ...


class FlightRecord:
    """Writes the launches and ends of a data node's microbatches."""

    def __init__(self, writer: FlightWriter, measured: Callable[[], int], planner: RulePlanner | None) -> None:
        self._writer, self._measured, self._planner = writer, measured, planner
        self._flying: dict[MicrobatchId, HopPath] = {}

    def launched(self, microbatch: MicrobatchId, path: HopPath, now: float) -> None:
        if self._planner is not None and (self._planner.chosen is None or path.hops != self._planner.chosen.hops):
            raise RuntimeError("the data node launches without asking the rule that is to be measured")
        self._flying[microbatch] = path
        self._write(LAUNCHED, path)

    def passed(self, sender: PeerId, receipt: Receipt, now: float) -> None:
        return

    def ended(self, microbatch: MicrobatchId, path: HopPath | None) -> None:
        planned = self._flying.pop(microbatch, None)
        if planned is not None:
            self._write(LOST if path is None else HOME, path or planned)

    def _write(self, kind: str, path: HopPath) -> None:
        self._writer.write(kind, tuple(str(hop.peer) for hop in path.hops), self._measured())


def count_visits() -> Callable[[], int]:
    """The count of visits in the node's own book, from now on."""
    honestly, visits = MeasuredTimes.visited, Counter[PeerId]()

    def visited(self: MeasuredTimes, peer: PeerId, seconds: float, queue: int = 0) -> None:
        visits[peer] += 1
        honestly(self, peer, seconds, queue)

    MeasuredTimes.visited = visited  # type: ignore[method-assign]
    return visits.total


def emulate_data_node(rule: str, seed: int, flights: str | None, network: Path) -> None:
    """Before the node starts: its data role, if it gets one, launches by `rule` and writes its record."""
    if rule == OURS and flights is None:
        return
    counted = count_visits()

    @asynccontextmanager
    async def emulated_role(context: ModuleContext, first: Anchor | None) -> AsyncIterator[DataRole]:
        tokens, made = context.manifest.microbatch_tokens, list[RulePlanner]()

        def by_rule(
            rules: PathRules, membership: Membership, times: MeasuredTimes, home: Mapping[ModuleId, PeerId]
        ) -> Planner:
            routes = Network.read(network).routes if rule == REPLAY else {}
            schedule = {PeerId(own): [tuple(map(PeerId, each)) for each in those] for own, those in routes.items()}
            make = planner_of(rule, seed, tokens, schedule or None)
            planner = make(rules, membership, times, home) if make is Planner else make(rules, membership, times)
            if isinstance(planner, RulePlanner):
                made.append(planner)
            return planner

        node.runtime.role.Planner = by_rule  # type: ignore[assignment, misc]
        async with data_role(context, first) as role, AsyncExitStack() as stack:
            clock, planner = context.session.own.clock.monotonic, made[0] if made else None
            measured = counted
            if isinstance(planner, SwarmPlanner):
                tell(planner.rule, role, clock)
                measured = planner.rule.visits
            if flights is not None:
                writer = stack.enter_context(closing(FlightWriter(Path(flights))))
                tell(FlightRecord(writer, measured, planner), role, clock)
            yield role

    node.runtime.serving.data_role = emulated_role


def tell(listener: Listener, role: DataRole, now: Callable[[], float]) -> None:
    """Reports the data node's microbatches to the listener from now on."""
    ends: Any = role.runner._ends
    handle, passed, finished, lost = role.runner.handle, ends.passed, ends.finished, ends.lost

    def handle_and_tell(event: Event) -> None:
        if isinstance(event, Started) and event.purpose is Purpose.TRAIN:
            listener.launched(event.microbatch, event.path, now())
        handle(event)

    def passed_and_tell(sender: PeerId, receipt: Receipt) -> None:
        listener.passed(sender, receipt, now())
        passed(sender, receipt)

    def finished_and_tell(microbatch: MicrobatchId, path: HopPath) -> None:
        listener.ended(microbatch, path)
        finished(microbatch, path)

    def lost_and_tell(microbatch: MicrobatchId, detail: str) -> None:
        listener.ended(microbatch, None)
        lost(microbatch, detail)

    role.runner.handle = handle_and_tell  # type: ignore[method-assign]
    ends.passed, ends.finished, ends.lost = passed_and_tell, finished_and_tell, lost_and_tell


def allow_steps_back() -> None:
    """Lets paths through that visit two neighbouring stages in descending order, as SkipPipe's schedules do."""
    honestly = node.pipeline.admission.path_rules

    def path_rules(manifest: Manifest) -> PathRules:
        return replace(honestly(manifest), max_back_stops=2, max_back_distance=2)

    node.pipeline.admission.path_rules = path_rules


def emulate(spec: Spec) -> None:
    slow_computing(spec)
    slow_links(spec)
    emulate_data_node(spec.rule, spec.seed, spec.flights, Path(spec.network))
    if spec.rule == REPLAY:
        allow_steps_back()
    for name, limit in (("--window", spec.window), ("--slots", spec.slots)):
        if limit is not None:
            sys.argv += [name, str(limit)]


async def status_of(link: str, network: Path) -> dict[str, Any]:
    """What `skipstone status` says of a swarm of emulated nodes: only such a one can talk to them."""
    command = (sys.executable, "-P", "-m", "tests.e2e.emulated", Spec(0.0, str(network)).to_json())
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent.parent)}
    asked = await asyncio.create_subprocess_exec(
        *command, "status", link, "--json", stdout=subprocess.PIPE, env=environment
    )
    said, _ = await asked.communicate()
    if asked.returncode:
        raise RuntimeError(f"status ended with {asked.returncode}")
    answer: dict[str, Any] = json.loads(said)
    return answer


if __name__ == "__main__":
    emulate(Spec(**json.loads(sys.argv.pop(1))))
    main()
