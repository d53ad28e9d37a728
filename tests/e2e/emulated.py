"""A node on an emulated machine in an emulated place: `python -m tests.e2e.emulated SPEC join ...`, the rest as
`skipstone` has it.

It is the real node but for three things: a computation takes as long as it would on the emulated machine (the compute
thread sleeps for the rest, so the device is busy and the core is not), what comes by a link comes later, and a data
node may choose its peers by another rule (`tests/e2e/emulated_paths.py`). The directory (DHT) is not slowed down.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import node.pipeline.worker
import node.runtime.stage_role
from lab.world.arms import OURS
from node.__main__ import main
from node.pipeline.device_passes import DeferredWeights
from node.pipeline.runner import Job, LinkCodecs, Output
from node.pipeline.worker import DataWorker, HopWorker
from protocol.frames.frames import Hello
from protocol.manifest.manifest import Manifest
from protocol.transport.grpc_streams import AcceptedStream, DialledStream
from protocol.transport.grpc_transport import GrpcTransport
from swarm.pipeline.custody_events import Work
from swarm.vocabulary.announcement import Speed
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import Codec, MicrobatchId, PeerId, Reasoned
from swarm.workload.microbatch_sizes import Size
from swarm.workload.visit_cost import VisitCost
from tests.e2e.emulated_paths import emulate_data_node
from tests.e2e.late_frames import LateFrames
from tests.e2e.small_run import whole_lines

Written = Callable[[float, float], None]

WRITE_EVERY_S = 0.1
EMULATED_CHUNK_S = 0.002


@dataclass(frozen=True, slots=True)
class Spec:
    forward_s: float
    network: str
    backward_factor: float = 2.0
    bytes_per_s: float | None = None
    weights_factor: float = 0.0
    puts_off: bool | None = None
    rule: str = OURS
    window: int | None = None
    slots: int | None = None
    announced_factor: float = 1.0
    slowed: str | None = None
    flights: str | None = None
    codec: str | None = None
    computed: str | None = None
    counts: str | None = None
    seed: int = 0

    @property
    def visit_s(self) -> float:
        return (1 + self.backward_factor) * self.forward_s

    def compute_s(self, work: Work) -> float:
        """Of one computation, by a machine that is as fast as ever."""
        backward = self.backward_factor
        factors = {Work.FORWARD: 1.0, Work.BACKWARD: backward, Work.REPLAY: 1.0 + backward, Work.LOSS: 1.0 + backward}
        return factors[work] * self.forward_s

    def slower_by(self) -> float:
        if self.slowed is None:
            return 1.0
        try:
            return float(Path(self.slowed).read_text())
        except FileNotFoundError:
            return 1.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Network:
    region_of: dict[str, str]
    one_way_s: dict[str, dict[str, float]]

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
    """Every computation takes its emulated time, unless it really takes longer; the speed that is announced is the
    emulated one, or wrong as the specification says."""
    if spec.puts_off is not None:
        chosen = Reasoned(spec.puts_off, "as the specification says")
        node.pipeline.worker.puts_weights_off = lambda staleness, devices: chosen
    weights_s = _slow_weights(spec)

    def seconds_of(job: Job, put_off: int) -> float:
        return spec.compute_s(job.work) * spec.slower_by() - put_off * weights_s()

    written = _unwritten if spec.computed is None else _writer(Path(spec.computed))
    HopWorker.compute = lasting(HopWorker.compute, seconds_of, written)  # type: ignore[method-assign]
    DataWorker.compute = lasting(DataWorker.compute, seconds_of)  # type: ignore[method-assign]

    def announced(tokens: int) -> float:
        return spec.announced_factor * tokens / (spec.slower_by() * spec.visit_s)

    def timed(self: HopWorker, size: Size, seconds: float) -> None:
        self._cost = VisitCost(0.0)
        self._cost.add(size.tokens, 0, 0, size.tokens / announced(size.tokens))

    def measured(passes: object, manifest: Manifest, device: object) -> Speed:
        return Speed(announced(manifest.microbatch_tokens))

    HopWorker._timed = timed  # type: ignore[method-assign]
    node.runtime.stage_role.measure_speed = measured


def _unwritten(begun: float, seconds: float) -> None:
    """Nobody asked for it."""


def _writer(path: Path) -> Written:
    file = path.open("a", buffering=1)
    return lambda begun, seconds: print(begun, seconds, file=file)


def read_computed(path: Path) -> list[tuple[float, float]]:
    """When each computation began, by the monotonic clock, and its emulated seconds; none where nobody wrote."""
    return [(float(begun), float(seconds)) for begun, seconds in map(str.split, whole_lines(path))]


def lasting(
    honestly: Callable[[Any, Job], Output], seconds_of: Callable[[Job, int], float], written: Written = _unwritten
) -> Callable[[Any, Job], Output]:
    """A computation that takes as long as is said, or longer if it really does."""

    def put_off(worker: object) -> int:
        return worker.deferred.visits if isinstance(worker, HopWorker) else 0

    def compute(self: object, job: Job) -> Output:
        begun, before = time.monotonic(), put_off(self)
        output = honestly(self, job)
        seconds = seconds_of(job, put_off(self) - before)
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        written(begun, seconds)
        return output

    return compute


def _slow_weights(spec: Spec) -> Callable[[], float]:
    """Weight gradients that were put off take their emulated time, too, in chunks. Returns how long."""
    honestly = DeferredWeights._chunks
    slept: Counter[MicrobatchId] = Counter()

    def weights_s() -> float:
        return spec.weights_factor * spec.forward_s * spec.slower_by()

    def chunks(self: DeferredWeights, waiting: Any) -> Iterator[None]:
        whole_s = weights_s()
        count = math.ceil(whole_s / EMULATED_CHUNK_S)
        while slept[waiting.microbatch] < count:
            time.sleep(whole_s / count)
            slept[waiting.microbatch] += 1
            yield
        for _ in honestly(self, waiting):
            pass
        del slept[waiting.microbatch]

    DeferredWeights._chunks = chunks  # type: ignore[method-assign]
    return weights_s


def slow_links(spec: Spec) -> None:
    """Frames come as late as the network says. Both Hellos come at once: who is there is not known before."""
    for kind in (DialledStream, AcceptedStream):
        _make_late(kind, spec.bytes_per_s)
    honestly = GrpcTransport._link

    def link(self: GrpcTransport, peer: PeerId, stream: Any, hello: Hello) -> Any:
        stream.late.delay_s = Network.read(Path(spec.network)).between(self._peer, peer)
        return honestly(self, peer, stream, hello)

    GrpcTransport._link = link  # type: ignore[method-assign]


def _make_late(kind: Any, bytes_per_s: float | None) -> None:
    make, read, write = kind.__init__, kind.read, kind.write

    def init(self: Any, *arguments: object) -> None:
        make(self, *arguments)
        self.late = LateFrames(bytes_per_s)

    async def read_late(self: Any) -> bytes | None:
        frame = await read(self)
        return None if frame is None else await self.late.arrive(frame)

    async def write_stamped(self: Any, frame: bytes) -> None:
        SentBytes.add(len(frame))
        await write(self, await self.late.leave(frame))

    kind.__init__, kind.read, kind.write = init, read_late, write_stamped


class SentBytes:
    total = 0
    file: Path | None = None
    written_at = 0.0

    @classmethod
    def add(cls, size_bytes: int) -> None:
        cls.total += size_bytes
        if cls.file is not None and time.monotonic() - cls.written_at > WRITE_EVERY_S:
            cls.written_at = time.monotonic()
            part = cls.file.with_suffix(".part")
            part.write_text(str(cls.total))
            part.rename(cls.file)


def fix_codec(codec: Codec) -> None:
    LinkCodecs.choose = lambda self, to, traffic: codec  # type: ignore[method-assign]


def emulate(spec: Spec) -> None:
    slow_computing(spec)
    slow_links(spec)
    if spec.codec is not None:
        fix_codec(Codec[spec.codec.upper()])
    if spec.counts is not None:
        SentBytes.file = Path(spec.counts)
    emulate_data_node(spec.rule, spec.seed, spec.flights)
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
