"""One attack on a swarm of real processes, and the same swarm without it: `python -m tests.security.attack MODE`.

MODE is a lie of `tests.security.liar`, told by `--liars` of the `--replicas` of stage 1, or an intruder of `INTRUDERS`
with `--names` identities. Honest replicas' held-out loss is compared with an honest run's at equal tokens (`--calm
FILE`: a report to take it from). Exits with 1 if a bar is missed (`--most`: ratio).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit import tell
from node.averaging.anchor.anchor import Anchor, initial_anchor, version_of
from node.averaging.anchor.shared_vector import layout_of
from node.data.feed import held_out_microbatches, open_documents
from node.data.packing import Microbatch
from node.export.open_model import CPU
from node.export.source import routed_model
from node.export.swarm_source import SwarmSource
from node.model.shapes import parameter_shapes
from node.network.session import NetworkSession, visit
from node.observability.events import CaughtUp, RoundCommitted
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
from swarm.vocabulary.pipeline_messages import Backward, Direction, Forward, Receipt, ReceiptStatus, Settled
from swarm.vocabulary.types import AnchorVersion, Hop, ModuleId, PeerId
from swarm.vocabulary.types import Path as Route
from tests.e2e.lying import with_liars
from tests.e2e.round_watch import RoundWatch, watching
from tests.e2e.small_run import small_run
from tests.protocol.transport.link_peers import Node, Recorder, node, with_settings
from tests.security.adversary import Targets, visitors_directory
from tests.security.liar import CLAIMS, LIES

MODULE = ModuleId(1)
HELD_OUT = 128
LOSS_RATIO = 1.02
PACE_RATIO = 0.9
FASTER = 1.5  # of the schedule
START_S = 240.0
EVALUATION_S = 30.0
ANNOUNCED_EVERY_S = 20.0
AHEAD = 300
EXPORTED_ELSEWHERE = "`export LINK` would take an anchor that no honest replica made"
NAMED = {"reverse", "noise", "drift", "forged-rosters", "mean-reversed", "mean-elsewhere"}
"""Lies whose teller must be named. Others do no harm, or are refused without proof."""


@dataclass(eq=False)
class Record:
    """What happened in a run. Times count from when all nodes train."""

    watch: RoundWatch
    roles: dict[str, str]
    honest: frozenset[str]
    module: ModuleId = MODULE  # With the liars
    begun: float = 0.0
    losses: list[tuple[float, int, float]] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    attacked_at: float = 0.0
    ended: float = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() - self.begun

    def evaluated_tokens(self) -> int:
        return self.losses[-1][1] if self.losses else 0

    def commits(self) -> list[RoundCommitted]:
        return [commit for peer in self.honest for commit in self.watch.commits_of(peer)]

    def pace(self, since: float, until: float) -> float:
        return sum(since <= at - self.begun < until for at in self.watch.stepped_at) / max(1e-9, until - since)


async def evaluate(session: NetworkSession, signed: SignedManifest, texts: list[Microbatch], record: Record) -> None:
    """Measures the loss of the anchors that most honest peers hold, whatever others announce."""
    at, tokens = record.now, record.watch.swarm.progress.tokens
    honest = record.honest | {peer for peer, role in record.roles.items() if role == "data node"}

    async def agreed(module: ModuleId, patience_s: float = 0.0) -> tuple[AnchorVersion, tuple[PeerId, ...]]:
        known = {a.peer: a.anchor for a in session.membership.with_state(module) if a.anchor and a.peer in honest}
        if not known:
            raise Rejected("no honest replica")
        [(version, _)] = Counter(known.values()).most_common(1)
        return version, tuple(peer for peer, anchor in known.items() if anchor == version)

    source = SwarmSource(session, signed, lambda *_: None)
    try:
        async with asyncio.timeout(EVALUATION_S):
            await session.membership_sync.alive(signed.manifest.modules())
            version, _ = await source.agreed(record.module)
            made = {commit.digest for commit in record.commits()}
            record.figures[EXPORTED_ELSEWHERE] += version.digest.hex() not in made
            source.agreed = agreed  # type: ignore[method-assign]
            decoder = await (await routed_model(source, CPU)).decoder(None)
        losses = [await asyncio.to_thread(decoder.loss, text) for text in texts]
        record.losses.append((at, tokens, statistics.fmean(losses)))
        tell(f"  {at:5.0f} s, {tokens} tokens: held-out loss {record.losses[-1][2]:.4f}")
    except (SkipstoneError, TimeoutError) as error:
        record.figures[f"not evaluated: {str(error)[:80]}"] += 1


@dataclass(eq=False)
class Scene:
    """What intruders know and count."""

    manifest: Manifest
    targets: Targets
    known: tuple[Announcement, ...]
    figures: Counter[str]
    options: Any
    stack: AsyncExitStack
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], every: float = 0.0) -> None:
        """Starts work, which is repeated if `every` is given; counts its errors."""

        async def working() -> None:
            while True:
                try:
                    await work()
                except SkipstoneError as error:
                    self.figures[str(error)[:80]] += 1
                if not every:
                    return
                await asyncio.sleep(every)

        task = asyncio.create_task(working())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def join(self, handler: Foe, module: ModuleId = MODULE, **lies: object) -> None:
        """Links a new identity with everybody, and announces it again and again."""
        persona, settings = self.targets.persona(), with_settings(ping_period_s=2.0)
        persona.book.contacts = {a.peer: Contact(a.peer, a.addresses, a.certificate) for a in self.known}
        handler.node = await self.stack.enter_async_context(node(persona, handler=handler, settings=settings))
        transport = handler.node.transport
        lies = {"addresses": (f"127.0.0.1:{transport.port}",), "slots": 1, "free_slots": 1} | lies
        transport._own_record = partial(self.targets.record, persona, module, **lies)
        for peer in persona.book.contacts:
            with suppress(PeerError):
                await transport.connect(peer)
        self.figures["identities"] += 1

        async def renew() -> None:
            transport.announce(transport._own_record())

        self.start(renew, ANNOUNCED_EVERY_S)


@dataclass
class Foe(Recorder):
    """A handler that knows its scene, and its node once that is linked."""

    scene: Scene = field(kw_only=True)
    node: Node = field(init=False)

    async def receipts(self, to: PeerId, message: Any, position: int, *said: ReceiptStatus) -> None:
        way = Direction.FORWARD if isinstance(message, Forward) else Direction.BACKWARD
        for status in said:
            await self.node.transport.send_control(to, Receipt(message.microbatch, way, position, status))


@dataclass
class Giver(Foe):
    """Serves the state of an anchor that it made up."""

    anchor: Anchor = field(kw_only=True)

    async def answer(self, sender: PeerId, question: Question) -> bytes:
        version, layout = self.anchor.version, self.anchor.layout
        if question.about is QuestionAbout.STATE and question.digest == version.digest:
            return encode_hash_list(HashList(version, layout.elements, layout.chunk_elements, self.anchor.hashes))
        raise Rejected("no")

    def received_control(self, sender: PeerId, message: object) -> None:
        if isinstance(message, StateRequest):
            self.scene.start(partial(self.give, sender, message))

    async def give(self, sender: PeerId, request: StateRequest) -> None:
        for number in request.chunks:
            data, chunk = self.anchor.chunk(number), StateChunk(request.module, request.digest, number)
            await self.node.transport.send(sender, chunk, TensorSpec((data.nbytes // 4,), DType.FLOAT32), data)
            self.scene.figures["chunks given"] += 1


async def names(scene: Scene) -> None:
    """Identities that announce another anchor of stage 1, many rounds ahead, and serve it. They compute nothing."""
    layout = layout_of(parameter_shapes(scene.manifest, MODULE), scene.manifest.training.fragments)
    values = np.random.default_rng(1).standard_normal(layout.elements).astype(np.float32) * np.float32(0.05)
    first, now = initial_anchor(layout, values), scene.targets.anchor(MODULE)
    version = version_of(layout, first.hashes, now.round + AHEAD, now.steps + 5 * AHEAD, now.tokens + 10**6, 0)
    for _ in range(scene.options.names):
        giver = Giver(refusal=Refusal(True, "busy"), scene=scene, anchor=replace(first, version=version))
        await scene.join(giver, anchor=version, tokens_per_second=0.0)


async def silent_names(scene: Scene) -> None:
    """Records in the DHT, of identities whose address accepts TCP and is silent."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    server = await scene.stack.enter_async_context(await asyncio.start_server(silent, "127.0.0.1", 0))
    lies = {"addresses": (f"127.0.0.1:{server.sockets[0].getsockname()[1]}",), "slots": 1, "free_slots": 1}
    personas = [scene.targets.persona() for _ in range(scene.options.names)]
    directory = await scene.stack.enter_async_context(visitors_directory(scene.targets.link))

    async def store() -> None:
        for persona in personas:
            a = scene.targets.announcement(persona, MODULE, **lies)
            key, record = directory_key(a.run, MODULE), encode_record(a, persona.identity)
            put = pb.DhtStore(key=key, owner=a.peer, record=record, expires_at=a.expires_at)
            with suppress(SkipstoneError):
                await directory.ask(pb.DhtRequest(store=put), 15)
                scene.figures["records stored"] += 1

    scene.start(store, ANNOUNCED_EVERY_S)


class Keeper(Foe):
    """Accepts microbatches and keeps them."""

    def received(self, sender: PeerId, message: object, tensor: TensorSpec, buffer: memoryview) -> None:
        if isinstance(message, Forward):
            self.scene.figures["kept"] += 1
            self.scene.start(partial(self.receipts, sender, message, message.position, ReceiptStatus.ACCEPTED))


async def keepers(scene: Scene) -> None:
    """Identities that say they are fast, take microbatches of stage 1 and keep them; as many more every 55 s."""

    async def come() -> None:
        for _ in range(scene.options.names):
            await scene.join(Keeper(scene=scene))

    scene.start(come, 55)


class Rogue(Foe):
    """A data node that answers outputs with gradients of one length, the same for every token."""

    def received(self, sender: PeerId, message: object, tensor: TensorSpec, buffer: memoryview) -> None:
        self.scene.start(partial(self.back if isinstance(message, Forward) else self.settle, sender, message, tensor))

    async def back(self, sender: PeerId, message: Any, tensor: TensorSpec) -> None:
        one = np.random.default_rng(7).standard_normal(tensor.shape[-1]).astype(np.float32)
        gradient = np.tile(one, tensor.elements // tensor.shape[-1])
        gradient *= np.float32(self.scene.options.length / np.linalg.norm(gradient))
        await self.receipts(sender, message, message.position, ReceiptStatus.ACCEPTED, ReceiptStatus.PASSED_ON)
        spec, answer = (
            TensorSpec(tensor.shape, DType.FLOAT32),
            Backward(message.microbatch, message.path, message.position - 1),
        )
        await self.node.transport.send(sender, answer, spec, gradient.data.cast("B"))
        self.scene.figures["gradients sent"] += 1

    async def settle(self, sender: PeerId, message: Any, tensor: TensorSpec) -> None:
        await self.receipts(sender, message, -1, ReceiptStatus.ACCEPTED)
        await self.node.transport.send_control(sender, Settled(message.microbatch, message.path))


async def data_node(scene: Scene) -> None:
    """Announces stage 0 and gives each replica of stage 1 work `--rate` times a second."""
    await scene.join(rogue := Rogue(scene=scene), ModuleId(0), slots=0, free_slots=0)
    persona, tensor, numbers = rogue.node.persona, scene.targets.tensor, itertools.count(1)
    victims = [a.peer for a in scene.known if a.module == MODULE]
    hidden = np.random.default_rng(1).standard_normal(tensor.elements).astype(np.float32)

    async def work() -> None:
        for victim in victims:
            path = Route(persona.peer, (Hop(MODULE, victim),))
            forward = scene.targets.signed(persona.identity, path, 0, next(numbers))
            scene.start(partial(rogue.node.transport.send, victim, forward, tensor, hidden.data.cast("B")))

    scene.start(work, 1 / scene.options.rate)


INTRUDERS = {"names": names, "silent-names": silent_names, "keepers": keepers, "data-node": data_node}


@asynccontextmanager
async def intruder(mode: str, manifest: Manifest, record: Record, options: Any) -> AsyncIterator[None]:
    """Runs the intruder of this mode in this process, as long as the block lasts."""
    link, found = record.watch.swarm.link, dict[PeerId, Announcement]()
    async with visitors_directory(link) as directory:
        while found.keys() != record.roles.keys():
            with suppress(SkipstoneError):
                announced = await directory.look_up(list(manifest.modules()))
                found |= {a.peer: a for a in announced if a.anchor is not None and a.peer in record.roles}
            await asyncio.sleep(0.2)
    targets = Targets(link, {a.module: a for a in found.values() if a.module is not None}, hidden_tensor(manifest))
    async with AsyncExitStack() as stack:
        scene = Scene(manifest, targets, tuple(found.values()), record.figures, options, stack)
        try:
            await INTRUDERS[mode](scene)
            yield
        finally:
            for task in tuple(scene.tasks):
                task.cancel()
            await asyncio.gather(*scene.tasks, return_exceptions=True)


async def run(options: Any, mode: str, folder: Path, until_tokens: int = 0) -> Record:
    """Runs the swarm under `mode` for `--seconds`, or until it was evaluated after `until_tokens` tokens, if given."""
    shape = {"blocks": (2,), "staleness": 0} if options.whole else {"blocks": (0, 2), "staleness": 1}
    plain = small_run(Path("text"), inner_steps=5, is_open=options.open, **shape)
    module = ModuleId(len(plain.stages.blocks) - 1)
    data = plain.data.model_copy(update={"source": "python-stdlib"})
    manifest = plain.model_copy(update={"seed": options.seed, "data": data})
    documents = await asyncio.to_thread(open_documents, manifest)
    texts = await asyncio.to_thread(lambda: list(held_out_microbatches(manifest, HELD_OUT, documents)))
    liars = 0 if mode in (*INTRUDERS, "honest") else options.liars
    async with (
        with_liars(manifest, mode, folder, options.replicas - liars - options.whole, liars) as (swarm, lying, honest),
        watching(swarm, str(module)) as watch,
    ):
        roles = {peer.peer: f"honest {peer.index}" if peer.index else "data node" for peer in swarm.peers}
        honest |= {swarm.peers[0].peer} if options.whole else frozenset()
        record = Record(watch, roles | dict.fromkeys(lying, "liar"), honest, module)
        async with asyncio.timeout(START_S):
            while min(p.inner_steps for p in swarm.progress.peers.values()) < 1 or not record.commits():
                await asyncio.sleep(0.1)
        record.begun = time.monotonic()
        awaited, due = mode in INTRUDERS, 0.0
        limit = (options.before + options.seconds) * (2 if until_tokens else 1)
        async with visit(swarm.link) as session, AsyncExitStack() as stack:
            signed = await session.fetch_manifest(EVALUATION_S)
            session.membership_sync.watch(manifest.modules())
            await session.membership_sync.looked.wait()
            while awaited or (record.now < limit and not 0 < until_tokens <= record.evaluated_tokens()):
                if awaited and record.now >= options.before:
                    await stack.enter_async_context(intruder(mode, manifest, record, options))
                    awaited, record.attacked_at = False, record.now
                    limit = record.now + options.seconds
                    tell(f"{mode}: the attack begins after {record.now:.0f} s")
                if options.every and record.now >= due:
                    due = record.now + options.every
                    await evaluate(session, signed, texts, record)
                await asyncio.sleep(0.2)
            record.ended = record.now
        await swarm.stop()
    return record


def ratios(losses: list[tuple[float, int, float]], calm: list[tuple[float, int, float]], grace: float) -> list[Any]:
    """Time and ratio to the honest run's loss at equal tokens, of each evaluation after `grace` seconds."""
    tokens, values = [row[1] for row in calm], [row[2] for row in calm]
    inside = [row for row in losses if row[0] >= grace and tokens and tokens[0] <= row[1] <= tokens[-1]]
    return [(round(at), round(loss / float(np.interp(of, tokens, values)), 4)) for at, of, loss in inside]


def judge(options: Any, record: Record, calm: list[tuple[float, int, float]]) -> dict[str, Any]:
    name, watch, roles = options.mode.partition(":")[0], record.watch, record.roles
    found = ratios(record.losses, calm, options.grace)
    worst = max((ratio for _, ratio in found), default=None)
    before = record.pace(0.0, record.attacked_at) if record.attacked_at else None
    during = record.pace(record.attacked_at, record.ended)
    pace = during / before if before else None
    pairs = [(roles.get(event.peer, ""), roles.get(event.accused, "?")) for event in watch.accusations]
    accused = Counter(pair for pair in pairs if pair[0] != "liar")
    liar_named = sorted({by for by, whom in accused if whom == "liar"})
    honest_named = sorted({whom for _, whom in accused if whom.startswith("honest")})
    tokens = {commit.round: commit.tokens for commit in record.commits()}
    schedule = round(sum(tokens.values()) / watch.swarm.progress.tokens, 2)
    # While a swarm gathers, replicas that begin alone join the one with most work.
    since = record.begun + (record.attacked_at or options.grace)
    taken_over = [stand.event for stand in watch.stands if stand.at > since]
    committed = {commit.digest for commit in record.commits()}
    foreign = [event for event in taken_over if isinstance(event, CaughtUp) and event.digest not in committed]
    left = sorted({roles[event.peer] for event in foreign if event.peer in record.honest})
    is_slowing = name in ("silent-names", "keepers")
    bars = {
        f"steps per second: {pace} of before": is_slowing and pace is not None and pace < PACE_RATIO,
        f"loss ratio {worst}": not is_slowing and options.every and (worst is None or worst > options.most),
        "the liar is not named": name in NAMED and not liar_named,
        f"the schedule runs {schedule} times as fast": schedule > FASTER,
        f"named: {', '.join(honest_named)}": honest_named,
        f"left their anchor: {', '.join(left)}": left,
        EXPORTED_ELSEWHERE: name in INTRUDERS and record.figures[EXPORTED_ELSEWHERE],
    }
    missed = [bar for bar, is_missed in bars.items() if is_missed]
    return {
        "mode": options.mode,
        "replicas": options.replicas,
        "liars": 0 if name in (*INTRUDERS, "honest") else options.liars,
        "seed": options.seed,
        "ratios": found,
        "largest_ratio": worst,
        "compared_by": "tokens",
        "steps_per_s": {"before": before, "during": during, "ratio": pace},
        "liar_named_by": liar_named,
        "honest_named": honest_named,
        "accusations": {f"{by} accuses {whom}": count for (by, whom), count in accused.items()},
        "left_their_anchor": left,
        "rounds": max(tokens),
        "schedule": schedule,
        "figures": dict(record.figures),
        "exits": {index: end.exit_code for index, end in watch.swarm.ends.items() if end.exit_code},
        "losses": record.losses,
        "calm": calm,
        "missed": missed,
        "passed": not missed,
    }


async def experiment(options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        record = await run(options, options.mode, options.keep or Path(folder) / "attacked")
        calm = [] if options.calm is None else json.loads(options.calm.read_text())["calm"]
        if options.every and not calm and record.losses:
            calm = (await run(options, "honest", Path(folder) / "calm", record.evaluated_tokens())).losses
    return judge(options, record, calm)


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode")
    numbers = {"replicas": 3, "liars": 1, "names": 3, "seconds": 120.0, "before": 0.0, "every": 8.0}
    numbers |= {"grace": 60.0, "most": LOSS_RATIO, "seed": 11, "length": 1e12, "rate": 4.0}
    for key, value in numbers.items():
        parser.add_argument(f"--{key}", type=type(value), default=value, help=f"default: {value}")
    parser.add_argument("--open", action="store_true", help="a run that takes anyone's data")
    parser.add_argument("--whole", action="store_true", help="a run of one stage: each replica trains the whole model")
    for key in ("calm", "out", "keep"):
        parser.add_argument(f"--{key}", type=Path)
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
    print(json.dumps({key: value for key, value in report.items() if key not in ("losses", "calm")}))
    sys.exit(0 if report["passed"] else 1)


if __name__ == "__main__":
    main()
