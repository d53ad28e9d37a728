"""Rounds from end to end in one process: real runners, real round machines, links in memory or over gRPC."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from node.averaging.anchor.anchor import Anchor, hash_all, version_of
from node.averaging.anchor.shared_vector import SharedVector
from node.averaging.exchange.pieces import Plan, piece_spec
from node.averaging.module_rounds import PROGRESS_S, RoundReports
from node.averaging.round_runner import SteppedTo
from node.observability.events import CatchingUp, CaughtUp, RoundCommitted
from node.observability.status import DownloadStatus, RoundStatus
from protocol.interfaces.transport import Refusal
from swarm.vocabulary.averaging_messages import Contribution, Member, Roster, RoundId
from swarm.vocabulary.types import Codec, PeerId
from tests.kit.events import KeptEvents
from tests.kit.waiting import ManualClock, until
from tests.node.averaging.small_rounds import MODULE, RULE, TOKENS, Blocks, MadeUpOptimizer, Replica, hall
from tests.node.checkpoint.saved_states import state

INNER = 2
ROUNDS = 10
ELEMENTS = 50_000
PARTS = ("parameters", "momentum")


class Reference:
    """DiLoCo in one place, by torch: the replicas' mean pseudo-gradient, and outer SGD with Nesterov momentum."""

    def __init__(self, count: int, elements: int) -> None:
        self.parts = [Blocks(elements) for _ in range(count)]
        self.optimizers = [MadeUpOptimizer(part) for part in self.parts]
        self.anchor = self.vector(0).clone()
        self.momentum = torch.zeros_like(self.anchor)

    def vector(self, replica: int) -> torch.Tensor:
        return torch.cat([p.detach() for _, p in sorted(self.parts[replica].named_parameters())])

    @torch.no_grad()
    def a_round(self, number: int, inner_steps: int) -> None:
        for step in range(inner_steps):
            for index, optimizer in enumerate(self.optimizers):
                optimizer.step(1000 * number + 10 * step + index)
        gradient = sum(self.anchor - self.vector(i) for i in range(len(self.parts))) / len(self.parts)
        self.momentum = RULE.momentum * self.momentum + gradient
        self.anchor -= RULE.learning_rate * (gradient + RULE.momentum * self.momentum)
        for module in self.parts:
            named = [parameter for _, parameter in sorted(module.named_parameters())]
            for parameter, values in zip(named, self.anchor.split([p.numel() for p in named]), strict=True):
                parameter.copy_(values)


@pytest.mark.parametrize(
    ("codec", "tolerance", "share"),
    [
        (Codec.NONE, 1e-5, 0.0),
        (Codec.BF16, None, 0.01),
        (Codec.INT8, None, 0.02),
        (Codec.INT4, None, 0.1),
        (Codec.INT2, None, 0.2),
    ],
)
async def test_rounds_equal_the_algorithm_in_one_place(codec: Codec, tolerance: float | None, share: float) -> None:
    """`share` of the way that the parameters have come is what a lossy codec may be off."""
    async with hall(3, codec=codec, inner_steps=INNER, elements=ELEMENTS) as here:
        reference = Reference(3, ELEMENTS)
        start = reference.anchor.numpy().copy()
        for number in range(1, ROUNDS + 1):
            await here.a_round(number, INNER)
            reference.a_round(number, INNER)
        assert {tuple(sorted(r.history)) for r in here.replicas.values()} == {tuple(range(1, ROUNDS + 1))}
        assert here.agree()
        expected = reference.anchor.numpy()
        for replica in here.replicas.values():
            off = np.abs(replica.anchor.parameters - expected)
            if tolerance is not None:
                assert off.max() <= tolerance
                assert np.abs(replica.anchor.momentum - reference.momentum.numpy()).max() <= tolerance
            else:
                assert 0 < np.linalg.norm(off) <= share * np.linalg.norm(expected - start)
            stays = np.linalg.norm(replica.vector() - replica.anchor.parameters)
            if most := {Codec.INT4: 0.02, Codec.INT2: 0.06}.get(codec):
                assert 0 < stays <= most * np.linalg.norm(expected - start), "what was left out, and no more"
            else:
                assert stays == 0
        version = here[0].anchor.version
        assert (version.round, version.steps, version.tokens) == (ROUNDS, ROUNDS * INNER, 3 * ROUNDS * INNER * TOKENS)


async def test_slow_links_make_rounds_smaller_and_all_members_agree_on_how() -> None:
    async with hall(3, limit=Codec.INT2, inner_steps=INNER) as here:
        here.piece_s = 0.1
        await here.a_round(1, INNER)
        await here.a_round(2, INNER)
        assert here.agree()
        for replica in here.replicas.values():
            first, second = replica.settled
            assert [first.codec, second.codec] == ["int8", "int2"]
            assert second.sent_bytes < 0.42 * first.sent_bytes
            assert "no link was measured yet" in replica.codec_reasons[0]
            assert "Mbit/s" in replica.codec_reasons[1]


async def test_fragments_take_turns() -> None:
    async with hall(2, inner_steps=4, fragments=2) as here:
        layout = here[0].anchor.layout
        parts = [layout.range_of(*fragment) for fragment in layout.fragments]
        covered = np.concatenate([np.arange(p.start, p.stop) for p in layout.spans])
        assert np.array_equal(covered, np.arange(layout.elements)), "spans neither overlap nor leave gaps"
        for number in range(1, 7):
            await here.a_round(number, 2)
            assert here[0].anchor.version.fragment == number % 2
            part = parts[(number - 1) % 2]
            for replica in here.replicas.values():
                np.testing.assert_array_equal(replica.vector()[part], replica.anchor.parameters[part])
        assert here.agree()
        assert not np.array_equal(here[0].vector(), here[1].vector()), "the other fragment is each replica's own"


async def test_work_done_meanwhile_is_carried_over() -> None:
    async with hall(2, inner_steps=INNER) as here:
        meanwhile = asyncio.Event()

        def on_piece(sender: object, to: object, message: object, data: object) -> None:
            meanwhile.set()

        here.on_piece = on_piece
        for replica in here.replicas.values():
            for step in range(INNER):
                await replica.step(step)
        await meanwhile.wait()
        before = here[0].vector()
        await here[0].step(99)
        extra = here[0].vector() - before
        await until(lambda: all(r.settled for r in here.replicas.values()))
        np.testing.assert_allclose(here[0].vector(), here[0].anchor.parameters + extra, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(here[1].vector(), here[1].anchor.parameters)
        assert here[0].runner.replica_sync.since_anchor.steps == 1
        assert here[0].optimizer.steps == INNER + 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
async def test_who_vanishes_in_the_middle_does_not_stop_the_others(share: float) -> None:
    async with hall(4, elements=2_000_000, inner_steps=INNER) as here:
        await here.a_round(1, INNER)
        pieces = here.pieces

        def on_piece(sender: object, to: object, message: object, data: object) -> None:
            if here.pieces >= pieces + share * pieces:
                here.dead.add(here[3].peer)

        here.on_piece = on_piece
        await here.a_round(2, INNER)
        here.on_piece = lambda sender, to, message, data: None
        here.dead.add(here[3].peer)
        await here.a_round(3, INNER)
        assert here.agree()
        assert len({r.anchor.version for r in here.living}) == 1


async def test_a_bad_member_is_left_out() -> None:
    async with hall(3, inner_steps=INNER) as here:
        bad = here[2].peer

        def on_piece(sender: object, to: object, message: object, data: bytearray) -> None:
            if sender == bad and isinstance(message, Contribution):
                np.frombuffer(data, np.float32)[3] = np.nan

        here.on_piece = on_piece
        for replica in here.replicas.values():
            for step in range(INNER):
                await replica.step(10 * step + hash(replica.peer) % 7)
        honest = [here[0], here[1]]
        await until(lambda: all(r.settled for r in honest))
        assert here.agree()
        for replica in honest:
            assert bad not in replica.settled[0].members
            assert np.isfinite(replica.anchor.parameters).all()
            assert replica.settled[0].attempts > 1


async def test_one_that_is_broken_starts_again_from_its_anchor() -> None:
    async with hall(3, inner_steps=INNER) as here:
        base = here[2].vector()
        for step in range(INNER):
            for index, replica in enumerate(here.replicas.values()):
                await replica.step(10 * step + index)
                if replica is here[2]:
                    replica.local.write(slice(0, 1), np.array([np.nan], np.float32))
        await until(lambda: all(r.settled for r in (here[0], here[1])))
        assert here.agree()
        await until(lambda: np.isfinite(here[2].vector()).all())
        assert np.isfinite(base).all()


async def test_who_is_alone_steps_alone_and_rejoins() -> None:
    async with hall(2, inner_steps=INNER) as here:
        await here.a_round(1, INNER)
        here.dead.add(here[1].peer)
        await until(lambda: here[0].runner.replica_sync.is_alone())
        for step in range(3 * INNER + 1):
            await here[0].step(500 + step)
        await until(lambda: here[0].settled[-1].round == 4)
        assert here[0].anchor.version.round == 4
        assert here[0].runner.replica_sync.since_anchor.steps == 1
        here.dead.clear()
        await until(lambda: here[1].anchor.version == here[0].anchor.version)
        assert here[1].caught_up == len(here[1].left) == 1
        await until(lambda: np.array_equal(here[1].vector(), here[0].anchor.parameters))
        await here.a_round(5, INNER)
        assert here.agree()


@pytest.mark.parametrize("part", ["parameters", "momentum"])
async def test_one_that_stands_where_no_rounds_lead_is_not_followed(part: str) -> None:
    """Of two, the one with more tokens is right; but it can only be so far from the other."""
    async with hall(2, inner_steps=INNER) as here:
        for number in (1, 2, 3):
            await here.a_round(number, INNER)
        honest, liar = here[0], here[1]
        await stand_alone(liar, {part: np.float32(5.0)})
        await until(lambda: honest.caught_up == 1)
        held = honest.anchor
        await here.a_round(4, INNER)  # the liar's own would be refused again
        assert held.version.round == 3
        assert honest.settled[-1].members == (honest.peer,)
        assert np.abs(honest.vector()).max() < 10


async def stand_alone(replica: Replica, shift: dict[str, np.float32]) -> None:
    """Stands on an anchor of its own, which differs from that of all by `shift` in every element."""
    anchor = replica.anchor
    arrays = {name: getattr(anchor, name).arrays for name in PARTS}
    state = {name: SharedVector([array + shift.get(name, 0) for array in arrays[name]]) for name in PARTS}
    hashes = hash_all(anchor.layout, state["parameters"], state["momentum"])
    version = version_of(anchor.layout, hashes, anchor.version.round + 1, anchor.version.steps + INNER, 2**40, 0)
    alone = Anchor(anchor.layout, version, state["parameters"], state["momentum"], hashes)
    replica.runner._store.put(alone)
    replica.runner._stepped_alone(SteppedTo(alone, TOKENS))


async def test_a_next_attempt_that_begins_while_an_exchange_waits_for_the_one_before_keeps_its_pieces() -> None:
    """One that objects to the first roster at once makes the second attempt follow within milliseconds."""
    async with hall(2, inner_steps=INNER) as here:
        await here.a_round(1, INNER)
        own, other = here[0], here[1]
        runner, chunks = own.runner, own.anchor.layout.chunks
        first, second = (RoundId(MODULE, 2, attempt, other.peer) for attempt in (0, 1))
        members = Member(own.peer, 0, chunks, 0.5, 1.0), Member(other.peer, chunks, chunks, 0.5, 1.0)
        await runner.take_snapshot(first)
        roster = Roster(first, own.anchor.version, members, 4, 4 * TOKENS)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(runner.exchange(roster))
            tasks.create_task(runner.take_snapshot(second))
        piece = Plan(own.peer, own.anchor.layout, replace(roster, round=second)).shards[own.peer][0]
        early = Contribution(second, piece.first_chunk, piece.end_chunk)
        admitted = runner.admit(other.peer, early, piece_spec(Codec.NONE, piece.elements))
        assert not isinstance(admitted, Refusal), admitted.detail


OWN, A, B = PeerId("own"), PeerId("a"), PeerId("b")


def test_a_download_is_told_once_a_second_and_the_last_round_is_remembered() -> None:
    clock, kept = ManualClock(), KeptEvents()
    news = RoundReports(OWN, MODULE, clock, kept)
    wanted, known = state(3), state(2)
    with news.fetching(wanted.version):
        for done in range(5):
            news.progressed(done, 8)
            clock.now += PROGRESS_S / 2
        assert kept.events == [CatchingUp(OWN, "1.0", 3, done, 8) for done in (0, 2, 4)]
        assert news.catching_up() == DownloadStatus(3, 4, 8)
        news.caught_up(wanted, known, (A, B), {B: 7})
    told = kept.events[-1]
    assert isinstance(told, CaughtUp)
    assert (told.donors, told.donor_bytes, told.seconds) == ((A, B), (0, 7), 2.5 * PROGRESS_S)
    assert news.catching_up() is None
    news.progressed(8, 8)
    assert kept.events[-1] is told
    clock, kept = ManualClock(), KeptEvents()
    news = RoundReports(OWN, MODULE, clock, kept)
    assert news.last_round() is None
    event = RoundCommitted(OWN, "1.0", 3, "", (OWN, A, B), (OWN, A), 100, 1, 0.5, 10, 20, "int4")
    news.committed(event, "slow", 1.0)
    clock.now += 4
    assert news.last_round() == RoundStatus(3, 4.0, "int4", "slow")
    assert kept.events == [event]
