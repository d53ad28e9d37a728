"""One attack on a swarm of real processes, and the same swarm without it: `python -m tests.security.attack MODE`.

MODE is a lie of `tests.security.liar` (with its options: `reverse:factor=-5,after=30`), told by `--liars` of the
`--replicas` of stage 1; or an intruder of `INTRUDERS`, which comes after `--before` seconds with `--names` identities.
The held-out loss of the anchors that honest replicas hold is measured every `--every` seconds, and compared with the
honest run's at equal tokens (`--calm FILE`: a report whose honest run serves again). Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from node.averaging.anchor.anchor import Anchor, hash_all, version_of
from node.averaging.anchor.layout import layout_of
from node.averaging.anchor.shared_vector import cut_vector
from node.data.feed import held_out_microbatches, open_documents
from node.data.packing import Microbatch
from node.export.open_model import CPU
from node.export.source import routed_model
from node.export.swarm_source import SwarmSource
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, LocalSwarmOptions
from node.model.shapes import parameter_shapes
from node.network.session import NetworkSession, visit
from node.observability.events import CaughtUp, ReplicaAccused, RoundCommitted, Step
from node.pipeline.admission import hidden_tensor
from protocol.frames.frames import HashList, encode_hash_list
from protocol.generated import dht_process_pb2 as pb
from protocol.identity.signed_records import directory_key, encode_record
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Contact, Question, QuestionAbout, Refusal
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import SignedManifest
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.averaging_messages import StateChunk, StateRequest
from swarm.vocabulary.errors import PeerError, Rejected, SkipstoneError
from swarm.vocabulary.pipeline_messages import (
    Backward,
    ControlMessage,
    Direction,
    Forward,
    Receipt,
    ReceiptStatus,
    Settled,
    TensorMessage,
)
from swarm.vocabulary.types import AnchorVersion, Hop, ModuleId, PeerId
from swarm.vocabulary.types import Path as Route
from tests.e2e.small_run import small_run
from tests.protocol.transport.link_peers import SETTINGS, Node, Recorder, node
from tests.security.adversary import Targets, find_targets, visitors_directory
from tests.security.liar import CLAIMS, LIES

MODULE = ModuleId(1)
HELD_OUT = 128
LOSS_RATIO = 1.02
PACE_RATIO = 0.9
FASTER = 1.5  # of the schedule
BEYOND = 1.08  # so that the honest run is evaluated beyond the last one to compare
START_S = 240.0
EVALUATION_S = 30.0
ANNOUNCED_EVERY_S = 20.0
AHEAD = 300
NAMED = {"reverse", "noise", "drift", "forged-rosters", "mean-reversed", "mean-elsewhere"}
"""Lies whose teller must be named. Others do no harm, or are refused without proof."""


# ---- what a swarm does -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Record:
    """Events of a run, with their times since all nodes serve."""

    roles: dict[str, str] = field(default_factory=dict)
    begun: float = 0.0
    steps: list[float] = field(default_factory=list)
    losses: list[tuple[float, int, float]] = field(default_factory=list)
    committed: set[str] = field(default_factory=set)
    caught_up: list[tuple[str, str]] = field(default_factory=list)
    accused: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens: dict[int, int] = field(default_factory=dict)  # by round
    rounds: int = 0
    trained: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    attacked_at: float = 0.0
    ended: float = 0.0
    exits: dict[int, int] = field(default_factory=dict)

    @property
    def now(self) -> float:
        return time.monotonic() - self.begun

    async def read(self, swarm: LocalSwarm) -> None:
        async for event in swarm.events():
            role = self.roles.get(getattr(event, "peer", ""), "")
            match event:
                case Step():
                    self.steps.append(time.monotonic())
                case RoundCommitted() if event.module == str(MODULE) and role.startswith("honest"):
                    self.committed.add(event.digest)
                    self.rounds = max(self.rounds, event.round)
                    self.tokens[event.round] = event.tokens
                case CaughtUp() if event.module == str(MODULE) and role.startswith("honest"):
                    self.caught_up.append((role, event.digest))
                case ReplicaAccused():
                    self.accused[role, self.roles.get(event.accused, "?")] += 1

    def pace(self, since: float, until: float) -> float:
        return sum(since <= at - self.begun < until for at in self.steps) / max(1e-9, until - since)

    def left(self) -> list[str]:
        """Honest replicas that took over an anchor which no honest replica has committed."""
        return sorted({role for role, digest in self.caught_up if digest not in self.committed})


class HonestSource(SwarmSource):
    """The anchors that most of the honest peers hold, whatever others announce."""

    def __init__(self, session: NetworkSession, signed: SignedManifest, honest: frozenset[str]) -> None:
        super().__init__(session, signed, lambda *_: None)
        self._honest = honest

    async def agreed(self, module: ModuleId, patience_s: float = 0.0) -> tuple[AnchorVersion, tuple[PeerId, ...]]:
        known = {a.peer: a.anchor for a in self._session.membership.with_state(module) if a.peer in self._honest}
        if not known:
            raise Rejected("no honest replica")
        version, _ = Counter(known.values()).most_common(1)[0]
        assert version is not None
        return version, tuple(peer for peer, anchor in known.items() if anchor == version)


async def evaluate(swarm: LocalSwarm, record: Record, texts: list[Microbatch], every: float) -> None:
    honest = frozenset(peer for peer, role in record.roles.items() if role != "liar")
    async with visit(swarm.link) as session:
        signed = await session.fetch_manifest(EVALUATION_S)
        session.membership_sync.watch(signed.manifest.modules())
        await session.membership_sync.looked.wait()
        while True:
            began, at, tokens = time.monotonic(), record.now, swarm.progress.tokens
            try:
                async with asyncio.timeout(EVALUATION_S):
                    await session.membership_sync.alive(signed.manifest.modules())
                    model = await routed_model(HonestSource(session, signed, honest), CPU)
                    decoder = await model.decoder(None)
                losses = [await asyncio.to_thread(decoder.loss, text) for text in texts]
                record.losses.append((at, tokens, statistics.fmean(losses)))
                tell(f"  {at:5.0f} s, {tokens} tokens: held-out loss {record.losses[-1][2]:.4f}, round {record.rounds}")
            except (SkipstoneError, TimeoutError) as error:
                record.figures[f"not evaluated: {str(error)[:80]}"] += 1
            await asyncio.sleep(max(0.0, began + every - time.monotonic()))


# ---- intruders -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Scene:
    """What intruders know and count."""

    swarm: LocalSwarm
    manifest: Manifest
    targets: Targets
    known: tuple[Announcement, ...]
    figures: Counter[str]
    options: argparse.Namespace
    stack: AsyncExitStack
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def join(self, handler: Foe, announced: Callable[[int], dict[str, Any]], module: ModuleId) -> None:
        """Links a new identity with everybody, and announces what `announced` says for its port."""
        persona = self.targets.persona()
        persona.book.contacts = {a.peer: Contact(a.peer, a.addresses, a.certificate) for a in self.known}
        settings = replace(SETTINGS, ping_period_s=2.0)
        joined = await self.stack.enter_async_context(node(persona, handler=handler, settings=settings))
        lies = announced(joined.port)
        record = lambda: self.targets.record(persona, module, **lies)  # noqa: E731
        joined.transport._own_record = record
        handler.node = joined
        for peer in persona.book.contacts:
            with suppress(PeerError):
                await joined.transport.connect(peer)
        self.figures["identities"] += 1

        async def renew() -> None:
            while True:
                await asyncio.sleep(ANNOUNCED_EVERY_S)
                joined.transport.announce(record())

        self.start(renew())


@dataclass
class Foe(Recorder):
    """A handler that knows its scene, and its node once that is linked."""

    scene: Scene = field(kw_only=True)
    node: Node = field(init=False)

    async def send_control(self, to: PeerId, message: ControlMessage) -> None:
        with suppress(PeerError):
            await self.node.transport.send_control(to, message)

    async def send(self, to: PeerId, message: TensorMessage, tensor: TensorSpec, data: memoryview) -> None:
        with suppress(PeerError):
            await self.node.transport.send(to, message, tensor, data)


@dataclass
class Giver(Foe):
    """Serves the state of an anchor that it made up."""

    anchor: Anchor = field(kw_only=True)

    def admit(self, *_: object) -> Refusal:
        return Refusal(True, "busy")

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        anchor = self.anchor
        if question.about is QuestionAbout.STATE and question.digest == anchor.version.digest:
            layout = anchor.layout
            return encode_hash_list(HashList(anchor.version, layout.elements, layout.chunk_elements, anchor.hashes))
        raise Rejected("no")

    def received_control(self, sender: PeerId, message: object) -> None:
        if isinstance(message, StateRequest):
            self.scene.start(self.give(sender, message))

    async def give(self, sender: PeerId, request: StateRequest) -> None:
        for chunk in request.chunks:
            data = self.anchor.chunk(chunk)
            tensor = TensorSpec((data.nbytes // 4,), DType.FLOAT32)
            await self.send(sender, StateChunk(request.module, request.digest, chunk), tensor, data)
            self.scene.figures["chunks given"] += 1


async def names(scene: Scene) -> None:
    """Identities that announce another anchor of stage 1, many rounds ahead, and serve it. They compute nothing."""
    layout = layout_of(parameter_shapes(scene.manifest, MODULE), scene.manifest.training.fragments)
    values = np.random.default_rng(1).standard_normal(layout.elements).astype(np.float32) * np.float32(0.05)
    parameters, momentum = cut_vector(layout, values), cut_vector(layout, np.zeros_like(values))
    hashes, now = hash_all(layout, parameters, momentum), scene.targets.anchor(MODULE)
    version = version_of(layout, hashes, now.round + AHEAD, now.steps + 5 * AHEAD, now.tokens + 10**6, 0)
    anchor = Anchor(layout, version, parameters, momentum, hashes)

    def announced(port: int) -> dict[str, Any]:
        return {
            "anchor": version,
            "addresses": (f"127.0.0.1:{port}",),
            "tokens_per_second": 0.0,
            "slots": 1,
            "free_slots": 0,
        }

    for _ in range(scene.options.names):
        await scene.join(Giver(scene=scene, anchor=anchor), announced, MODULE)


async def silent_names(scene: Scene) -> None:
    """Records in the DHT, of identities whose address accepts TCP and is silent."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scene.figures["connections"] += 1
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    server = await scene.stack.enter_async_context(await asyncio.start_server(silent, "127.0.0.1", 0))
    lies = {"addresses": (f"127.0.0.1:{server.sockets[0].getsockname()[1]}",), "slots": 1, "free_slots": 1}
    personas = [scene.targets.persona() for _ in range(scene.options.names)]
    directory = await scene.stack.enter_async_context(visitors_directory(scene.swarm.link))

    async def store() -> None:
        while True:
            for persona in personas:
                a = scene.targets.announcement(persona, MODULE, **lies)
                key, record = directory_key(a.run, MODULE), encode_record(a, persona.identity)
                put = pb.DhtStore(key=key, owner=a.peer, record=record, expires_at=a.expires_at)
                try:
                    await directory.ask(pb.DhtRequest(store=put), 15)
                    scene.figures["records stored"] += 1
                except SkipstoneError:
                    scene.figures["records refused"] += 1
            await asyncio.sleep(ANNOUNCED_EVERY_S)

    scene.start(store())


class Keeper(Foe):
    """Accepts microbatches and keeps them."""

    def received(self, sender: PeerId, message: object, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, Forward):
            self.scene.figures["kept"] += 1
            receipt = Receipt(message.microbatch, Direction.FORWARD, message.position, ReceiptStatus.ACCEPTED)
            self.scene.start(self.send_control(sender, receipt))


async def keepers(scene: Scene) -> None:
    """Identities that say they are fast, take microbatches of stage 1 and keep them; as many more every 55 s."""

    async def come() -> None:
        while True:
            for _ in range(scene.options.names):
                await scene.join(
                    Keeper(scene=scene),
                    lambda port: {"addresses": (f"127.0.0.1:{port}",), "slots": 1, "free_slots": 1},
                    MODULE,
                )
            await asyncio.sleep(55)

    scene.start(come())


class Rogue(Foe):
    """A data node that answers outputs with gradients of one length, the same for every token."""

    def received(self, sender: PeerId, message: object, tensor: TensorSpec, buffer: memoryview) -> None:
        answer = self.back(sender, message, tensor) if isinstance(message, Forward) else self.settle(sender, message)
        self.scene.start(answer)

    async def back(self, sender: PeerId, message: Forward, tensor: TensorSpec) -> None:
        one = np.random.default_rng(7).standard_normal(tensor.shape[-1]).astype(np.float32)
        gradient = np.tile(one, tensor.elements // tensor.shape[-1])
        gradient *= np.float32(self.scene.options.length / np.linalg.norm(gradient))
        for status in (ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON):
            await self.send_control(sender, Receipt(message.microbatch, Direction.FORWARD, message.position, status))
        spec, back = TensorSpec(tensor.shape, DType.FLOAT32), message.position - 1
        await self.send(sender, Backward(message.microbatch, message.path, back), spec, gradient.data.cast("B"))
        self.scene.figures["gradients sent"] += 1

    async def settle(self, sender: PeerId, message: Any) -> None:
        receipt = Receipt(message.microbatch, Direction.BACKWARD, -1, ReceiptStatus.ACCEPTED)
        await self.send_control(sender, receipt)
        await self.send_control(sender, Settled(message.microbatch, message.path))
        self.scene.figures["settled"] += 1

    def received_control(self, sender: PeerId, message: object) -> None:
        if isinstance(message, Receipt):
            self.scene.figures[f"{message.status.name.lower()} {message.direction.name.lower()}"] += 1


async def data_node(scene: Scene) -> None:
    """Announces stage 0 and gives each replica of stage 1 work `--rate` times a second."""
    lies = {"state": scene.targets.announced[ModuleId(0)].state, "slots": 0, "free_slots": 0}
    rogue = Rogue(scene=scene)
    await scene.join(rogue, lambda port: lies | {"addresses": (f"127.0.0.1:{port}",)}, ModuleId(0))
    persona, transport = rogue.node.persona, rogue.node.transport
    victims = [a.peer for a in scene.known if a.module == MODULE]
    hidden = np.random.default_rng(1).standard_normal(scene.targets.tensor.elements).astype(np.float32)

    async def give(victim: PeerId, number: int) -> None:
        forward = scene.targets.signed(persona.identity, Route(persona.peer, (Hop(MODULE, victim),)), 0, number)
        try:
            await transport.send(victim, forward, scene.targets.tensor, hidden.data.cast("B"))
        except PeerError as error:
            scene.figures[f"forward: {str(error)[:80]}"] += 1

    async def work() -> None:
        number = 0
        while True:
            for victim in victims:
                number += 1
                scene.start(give(victim, number))
            await asyncio.sleep(1 / scene.options.rate)

    scene.start(work())


INTRUDERS = {"names": names, "silent-names": silent_names, "keepers": keepers, "data-node": data_node}


@asynccontextmanager
async def intruder(
    mode: str, swarm: LocalSwarm, manifest: Manifest, record: Record, options: Any
) -> AsyncIterator[None]:
    """The intruder of this mode, in this process, as long as the block lasts."""
    targets = await find_targets(swarm.link, hidden_tensor(manifest), manifest.modules())
    wanted, found = {peer.peer for peer in swarm.peers}, dict[PeerId, Announcement]()
    async with visitors_directory(swarm.link) as directory:
        while not wanted <= found.keys():
            with suppress(SkipstoneError):
                found |= {a.peer: a for a in await directory.look_up(list(manifest.modules())) if a.peer in wanted}
            await asyncio.sleep(0.2)
    async with AsyncExitStack() as stack:
        scene = Scene(swarm, manifest, targets, tuple(found.values()), record.figures, options, stack)
        try:
            await INTRUDERS[mode](scene)
            yield
        finally:
            for task in tuple(scene.tasks):
                task.cancel()
            await asyncio.gather(*scene.tasks, return_exceptions=True)


# ---- one run and its judgement ---------------------------------------------------------------------------------------


def attacked_run(options: Any) -> Manifest:
    run = small_run(Path("text"), blocks=(0, 2), inner_steps=5, staleness=1)
    data = run.data.model_copy(update={"source": "python-stdlib"} | ({"open": True} if options.open else {}))
    return run.model_copy(update={"seed": options.seed, "data": data})


async def run(options: Any, mode: str, folder: Path, until_tokens: int = 0) -> Record:
    """Runs the swarm under `mode` for `--seconds`, or, if given, until so many tokens have been trained."""
    manifest, record = attacked_run(options), Record()
    documents = await asyncio.to_thread(open_documents, manifest)
    texts = await asyncio.to_thread(lambda: list(held_out_microbatches(manifest, HELD_OUT, documents)))
    lying = Deployment(command=(sys.executable, "-P", "-m", "tests.security.liar", mode))
    lies = mode.partition(":")[0] in {*CLAIMS, *LIES} - {"honest"}
    first_liar = 1 + options.replicas - (options.liars if lies else 0)
    swarm_options = LocalSwarmOptions(peers=1 + options.replicas, threads=1, log_dir=folder)
    deployments: Any = lambda index: lying if index >= first_liar else Deployment()  # noqa: E731
    async with LocalSwarm(manifest, swarm_options, deployments=deployments) as swarm:
        for peer in swarm.peers:
            role = "data node" if peer.index == 0 else "liar" if peer.index >= first_liar else "honest"
            record.roles[peer.peer] = role if role != "honest" else f"honest {peer.index}"
        record.begun = time.monotonic()
        reading = asyncio.create_task(record.read(swarm))
        async with asyncio.timeout(START_S):
            while min(p.inner_steps for p in swarm.progress.peers.values()) < 1 or not record.committed:
                await asyncio.sleep(0.1)
        record.begun = time.monotonic()
        tell(f"{mode}: all nodes work")
        evaluating = asyncio.create_task(evaluate(swarm, record, texts, options.every)) if options.every else None
        limit = options.before + options.seconds

        async def to_the_end() -> None:
            while record.now < (2 * limit if until_tokens else limit) and not 0 < until_tokens <= swarm.progress.tokens:
                await asyncio.sleep(0.2)
                if evaluating is not None and evaluating.done():
                    evaluating.result()

        if mode in INTRUDERS:
            await asyncio.sleep(options.before)
            async with intruder(mode, swarm, manifest, record, options):
                tell(f"{mode}: the attack begins after {record.now:.0f} s")
                record.attacked_at = record.now
                limit += record.now - options.before
                await to_the_end()
        else:
            await to_the_end()
        record.ended, record.trained = record.now, swarm.progress.tokens
        if evaluating is not None:
            evaluating.cancel()
            await asyncio.wait((evaluating,))
        await swarm.stop()
        await asyncio.wait((reading,), timeout=10)
        record.exits = {index: end.exit_code for index, end in swarm.ends.items() if end.exit_code}
    return record


def ratios(losses: list[tuple[float, int, float]], calm: list[tuple[float, int, float]], grace: float) -> list[Any]:
    """Time and ratio to the honest run's loss at equal tokens, of each evaluation after `grace` seconds."""
    tokens, values = [row[1] for row in calm], [row[2] for row in calm]
    inside = [row for row in losses if row[0] >= grace and tokens and tokens[0] <= row[1] <= tokens[-1]]
    return [(round(at), round(loss / float(np.interp(of, tokens, values)), 4)) for at, of, loss in inside]


def judge(options: Any, record: Record, calm: list[tuple[float, int, float]]) -> dict[str, Any]:
    name = options.mode.partition(":")[0]
    found = ratios(record.losses, calm, options.grace)
    worst = max((ratio for _, ratio in found), default=None)
    before = record.pace(0.0, record.attacked_at) if record.attacked_at else None
    during = record.pace(record.attacked_at, record.ended)
    by_honest = {f"{by} accuses {whom}": n for (by, whom), n in record.accused.items() if by != "liar"}
    liar_named = sorted({by for by, whom in record.accused if whom == "liar" and by != "liar"})
    honest_named = sorted({whom for by, whom in record.accused if whom.startswith("honest") and by != "liar"})
    missed = []
    if name in ("silent-names", "keepers"):
        if before and during / before < PACE_RATIO:
            missed.append(f"steps per second: {during / before:.2f} of before")
    elif options.every and (worst is None or worst > LOSS_RATIO):
        missed.append(f"loss ratio {worst}")
    if name in NAMED and not liar_named:
        missed.append("the liar is not named")
    schedule = round(sum(record.tokens.values()) / record.trained, 2)
    if schedule > FASTER:
        missed.append(f"the schedule runs {schedule} times as fast")
    if honest_named:
        missed.append(f"named: {', '.join(honest_named)}")
    if record.left():
        missed.append(f"left their anchor: {', '.join(record.left())}")
    return {
        "mode": options.mode,
        "replicas": options.replicas,
        "liars": 0 if name in INTRUDERS or name == "honest" else options.liars,
        "seed": options.seed,
        "ratios": found,
        "largest_ratio": worst,
        "compared_by": "tokens",
        "steps_per_s": {"before": before, "during": during, "ratio": during / before if before else None},
        "liar_named_by": liar_named,
        "honest_named": honest_named,
        "accusations": by_honest,
        "left_their_anchor": record.left(),
        "rounds": record.rounds,
        "schedule": schedule,
        "figures": dict(record.figures),
        "exits": record.exits,
        "losses": record.losses,
        "calm": calm,
        "missed": missed,
        "passed": not missed,
    }


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def experiment(options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        record = await run(options, options.mode, options.keep or Path(folder) / "attacked")
        calm = [] if options.calm is None else json.loads(options.calm.read_text())["calm"]
        if options.every and not calm and record.losses:
            calm = (await run(options, "honest", Path(folder) / "calm", int(record.losses[-1][1] * BEYOND))).losses
    return judge(options, record, calm)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode")
    numbers = {"replicas": 3, "liars": 1, "names": 3, "seconds": 120.0, "before": 0.0, "every": 8.0}
    for key, value in (numbers | {"grace": 60.0, "seed": 11, "length": 1e12, "rate": 4.0}).items():
        parser.add_argument(f"--{key}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--open", action="store_true", help="a run that takes anyone's data")
    for key in ("calm", "out", "keep"):
        parser.add_argument(f"--{key}", type=Path)
    parser.add_argument("--json", action="store_true", help="print the whole report")
    options = parser.parse_args(words)
    if options.mode in INTRUDERS:
        options.before = options.before or 20.0
    elif options.mode.partition(":")[0] not in {*CLAIMS, *LIES}:
        parser.error(f"no such mode: choose one of {', '.join((*CLAIMS, *LIES, *INTRUDERS))}")
    return options


def main() -> None:
    options = parsed(sys.argv[1:])
    report = asyncio.run(experiment(options))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    brief = {key: value for key, value in report.items() if key not in ("losses", "calm")}
    print(json.dumps(report if options.json else brief))
    sys.exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
