"""Auditors catch reducers that lie and accuse no honest one, with real runners and round machines in one process."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from node.averaging.auditor import PATIENCE, Auditor
from node.averaging.exchange.all_reduce import AllReduce
from node.averaging.exchange.reduction import Reduction, opposed
from swarm.compression.round_codecs import codec_levels
from swarm.vocabulary.averaging_messages import Accusation, AuditRefused, Contribution, Evidence, SignedHash
from swarm.vocabulary.types import Codec, PeerId
from tests.kit.waiting import LONG_S, until
from tests.node.averaging.small_rounds import Hall, hall

INNER = 2
EVERY = (Codec.NONE, Codec.BF16, *codec_levels(Codec.INT2))
LIAR = PeerId("peer-2")


class Always(Random):
    def random(self) -> float:
        return 0.0

    def getrandbits(self, k: int, /) -> int:
        return super().getrandbits(k)


class Never(Random):
    def random(self) -> float:
        return 1.0


WORK_S = 0.5


def audit_always(here: Hall) -> None:
    for number, replica in enumerate(here.replicas.values()):
        replica.runner.auditor._random = Always(number)


Lie = Callable[[np.ndarray], np.ndarray]


def lie_of(monkeypatch: pytest.MonkeyPatch, change: Lie, *, in_one_piece: bool = False) -> None:
    """The liar sends everybody, itself included, another mean."""
    honestly = Reduction.finish

    def finish(self: Reduction, piece: Any) -> memoryview:
        data = honestly(self, piece)
        if self._plan.own != LIAR or (in_one_piece and piece is not self._plan.shards[LIAR][0]):
            return data
        return change(np.frombuffer(data, np.float32).copy()).astype(np.float32).view(np.uint8).data

    monkeypatch.setattr(Reduction, "finish", finish)


def answers(monkeypatch: pytest.MonkeyPatch, change: Callable[[Evidence], Evidence | AuditRefused]) -> None:
    told = Auditor.receive

    def hear(self: Auditor, sender: PeerId, message: Any) -> None:
        told(self, sender, change(message) if isinstance(message, Evidence) and sender == LIAR else message)

    monkeypatch.setattr(Auditor, "receive", hear)


async def until_left_out(here: Hall, culprit: PeerId, rounds: int = 12, *, pairs: bool = False) -> None:
    """Rounds until all others know the culprit, or hold rounds without it; nobody else is caught. `pairs`: nor two."""
    honest = set(here.replicas) - {culprit}
    for number in range(1, rounds + 1):
        await work(here, number)
        knowing = {peer for peer in honest if culprit in certain(here, peer)}
        last = {peer: here.replicas[peer].settled[-1].members if here.replicas[peer].settled else () for peer in honest}
        apart = {peer for peer in honest if culprit not in last[peer] or (pairs and len(last[peer]) == 2)}
        if knowing and knowing | apart == honest:
            break
    assert knowing
    assert knowing | apart == honest
    assert {caught for peer in honest for caught in certain(here, peer)} == {culprit}


def certain(here: Hall, peer: PeerId) -> set[PeerId]:
    return {caught.peer for caught in here.replicas[peer].accused if caught.certain}


async def work(here: Hall, number: int) -> None:
    """A round of those still invited, and its audits. Who shuns a liar that others follow may have to catch up."""
    before = {replica.peer: replica.anchor.version.round for replica in here.replicas.values()}
    honest = [replica for replica in here.replicas.values() if replica.peer != LIAR]
    step = 0

    def held() -> bool:
        return all(replica.anchor.version.round > before[replica.peer] for replica in honest)

    async with asyncio.timeout(4 * LONG_S):  # a download that failed is tried again after 5 to 60 s
        # Who catches up has lost its work, so the others go on with theirs, as replicas do.
        while step < INNER or not held():
            for index, replica in enumerate(here.replicas.values()):
                await replica.step(1000 * number + 10 * step + index)
            step += 1
            if step >= INNER:
                with suppress(TimeoutError):
                    async with asyncio.timeout(WORK_S):
                        await until(held)
    auditors = [replica.runner.auditor for replica in here.replicas.values()]
    await until(lambda: all(not auditor.busy for auditor in auditors))


@pytest.mark.parametrize("codec", EVERY, ids=lambda codec: codec.name)
@pytest.mark.parametrize("members", [2, 5])
async def test_honest_rounds_bear_audits(codec: Codec, members: int) -> None:
    async with hall(members, codec=codec, inner_steps=INNER, elements=80_000) as here:
        audit_always(here)
        for number in range(1, 4):
            await here.a_round(number, INNER)
            await until(lambda: all(not r.runner.auditor.busy for r in here.replicas.values()))
        assert here.agree()
        for replica in here.replicas.values():
            assert replica.accused == []
            assert replica.runner.auditor.verdicts >= 1


def rotated(mean: np.ndarray) -> np.ndarray:
    other = mean * 0.5 + np.roll(mean, 4099) * 0.87
    return other / np.linalg.norm(other) * np.linalg.norm(mean)


@pytest.mark.parametrize("lie", [lambda mean: mean * 1.5, rotated], ids=["stretched", "rotated"])
async def test_a_reducer_with_another_mean_is_caught_and_left_out(monkeypatch: pytest.MonkeyPatch, lie: Lie) -> None:
    lie_of(monkeypatch, lie)
    async with hall(6, inner_steps=INNER, elements=160_000) as here:
        audit_always(here)
        await until_left_out(here, LIAR)
        assert here.agree()
        for replica in here.replicas.values():
            if replica.peer != LIAR and LIAR in certain(here, replica.peer):
                assert all(caught.proof for caught in replica.accused if caught.certain)
                assert LIAR in replica.runner._decide.__self__._view.penalties.excluded(0.0)  # type: ignore[attr-defined]


def contributions(**signs: float) -> dict[PeerId, np.ndarray]:
    """Pseudo-gradients with half of their squares in common, times a sign."""
    random = np.random.default_rng(1)
    common = random.standard_normal(4096)
    made = {PeerId(peer): sign * (common + random.standard_normal(4096)) for peer, sign in signs.items()}
    return {peer: values.astype(np.float32) for peer, values in made.items()}


def test_who_points_away_from_most_others_is_opposed_if_these_agree() -> None:
    assert opposed(contributions(a=1, b=1, liar=-3)) == {"liar"}
    assert opposed(contributions(a=1, b=1, c=1, liar=-1, other=-2)) == {"liar", "other"}
    assert opposed(contributions(a=1, b=1, c=1)) == frozenset()
    assert opposed(contributions(a=1, liar=-1)) == frozenset(), "two cannot tell"
    assert opposed(contributions(a=1, b=1, c=-1, d=-1)) == frozenset(), "nor can two pairs"
    unlike = np.random.default_rng(2).standard_normal((3, 4096)).astype(np.float32)
    assert opposed({PeerId(name): row for name, row in zip("abc", unlike, strict=True)}) == frozenset()


async def test_one_piece_of_four_is_found_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.averaging.exchange.pieces.SMALLEST_PIECE", 4096)
    lie_of(monkeypatch, lambda mean: np.roll(mean, 4099), in_one_piece=True)
    async with hall(3, inner_steps=INNER, elements=120_000) as here:
        audit_always(here)
        await until_left_out(here, LIAR, rounds=40)


async def test_a_contributor_that_shows_an_auditor_other_bytes_is_caught() -> None:
    async with hall(3, inner_steps=INNER, elements=120_000) as here:
        audit_always(here)
        contributed: set[object] = set()

        def on_piece(sender: PeerId, to: PeerId, message: object, data: bytearray) -> None:
            if sender == LIAR and isinstance(message, Contribution):
                again = (message.round, message.first_chunk) in contributed
                contributed.add((message.round, message.first_chunk))
                if again:
                    np.frombuffer(data, np.float32)[:] *= 2

        here.on_piece = on_piece
        await until_left_out(here, LIAR, pairs=True)  # its lie is about the piece of a third replica


VICTIM, OTHER = PeerId("peer-0"), PeerId("peer-1")


def last_piece(here: Hall, own: PeerId, reducer: PeerId) -> tuple[Contribution, SignedHash]:
    """What `own` contributed to the reducer's first piece of the last round, as message and as signed record."""
    record = here.replicas[own].runner.auditor._records[-1]
    piece = record.plan.shards[reducer][0]
    return record.plan.contribution(piece), record.own[piece]


def accuse(here: Hall, piece: Contribution, *shown: SignedHash) -> None:
    accusation = Accusation(piece.round, piece.first_chunk, piece.end_chunk, shown)
    here.replicas[VICTIM].dispatcher.received_control(LIAR, accusation)


async def test_a_contributor_that_signs_two_things_is_caught() -> None:
    """It lets another believe that the reducer used something else than what it has shown."""
    async with hall(3, inner_steps=INNER, elements=120_000) as here:
        await here.a_round(1, INNER)
        piece, signed = last_piece(here, LIAR, OTHER)
        signatures = here.replicas[LIAR].runner.auditor._means.signatures
        other = replace(signed, hash=bytes(32), signature=signatures.sign(piece, bytes(32)))
        accuse(here, piece, other, last_piece(here, VICTIM, OTHER)[1])
        await until(lambda: here.replicas[VICTIM].accused)
        assert certain(here, VICTIM) == {LIAR}
        assert "two different" in here.replicas[VICTIM].accused[0].why


async def test_a_contribution_that_its_sender_did_not_sign_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honestly = AllReduce._encode

    def encode(self: AllReduce, *rest: Any) -> Contribution:
        message = honestly(self, *rest)
        lies = self.plan.own == LIAR and message.round.number > 1
        return replace(message, signature=bytes(64)) if lies else message

    monkeypatch.setattr(AllReduce, "_encode", encode)
    async with hall(3, inner_steps=INNER) as here:
        await here.a_round(1, INNER)  # who is still at round 0 would follow a liar that goes on alone
        await work(here, 2)
        accused = [caught for replica in here.replicas.values() for caught in replica.accused]
        assert {caught.peer for caught in accused} == {LIAR}
        assert all("signature" in caught.why for caught in accused)
        honest = [replica for replica in here.replicas.values() if replica.peer != LIAR]
        await until(lambda: any(len(replica.settled) > 1 for replica in honest))
        rounds = [settled for replica in honest for settled in replica.settled[1:]]
        assert all(LIAR not in settled.members for settled in rounds)


async def test_a_reducer_that_cannot_show_signatures_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda evidence: replace(evidence, signed=evidence.signed[:-1]))
    async with hall(3, inner_steps=INNER, elements=120_000) as here:
        audit_always(here)
        await until_left_out(here, LIAR)


async def test_a_reducer_that_refuses_audits_is_left_out_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.averaging.auditor.PAUSES_S", (0.01,))
    answers(monkeypatch, lambda evidence: AuditRefused(evidence.round, evidence.first_chunk, evidence.end_chunk))
    async with hall(3, inner_steps=INNER, elements=120_000) as here:
        audit_always(here)
        for number in range(1, 40):
            await work(here, number)
            if any(r.accused for r in here.replicas.values()):
                break
        accused = [caught for r in here.replicas.values() for caught in r.accused]
        assert {(caught.peer, caught.certain) for caught in accused} == {(LIAR, False)}
        assert number >= PATIENCE


async def test_slander_costs_the_slanderer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Well-founded in form: the signatures hold. Who hears it finds nothing, again and again."""
    async with hall(3, inner_steps=INNER, elements=120_000) as here:
        auditor = here.replicas[VICTIM].runner.auditor
        auditor._random = Never()
        for number in range(1, PATIENCE + 1):
            await work(here, number)
            before = auditor.verdicts
            for _ in range(3):  # only the first in a round is heard
                accuse(here, last_piece(here, VICTIM, OTHER)[0])
            await until(lambda: auditor.verdicts > before and not auditor.busy)  # noqa: B023
            assert auditor.verdicts == before + 1
        assert [(caught.peer, caught.certain) for caught in here.replicas[VICTIM].accused] == [(LIAR, False)]
        assert all(OTHER not in {c.peer for c in r.accused} for r in here.replicas.values())


async def test_an_accusation_with_signatures_that_do_not_hold_costs_its_author() -> None:
    async with hall(3, inner_steps=INNER, elements=120_000) as here:
        await here.a_round(1, INNER)
        piece, signed = last_piece(here, VICTIM, OTHER)
        accuse(here, piece, replace(signed, hash=bytes(32)))
        await until(lambda: here.replicas[VICTIM].accused)
        assert certain(here, VICTIM) == {LIAR}


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.INT4, Codec.INT2])
async def test_audits_fetch_at_most_an_eighth_of_what_rounds_send(codec: Codec) -> None:
    async with hall(3, codec=codec, inner_steps=INNER, elements=40_000) as here:
        audited = number = 0
        while number < 40 or not audited:  # the next exchange may come before a piece was fetched
            number += 1
            await here.a_round(number, INNER)
            audited = sum(s.audit_received_bytes for r in here.replicas.values() for s in r.settled)
        sent = sum(s.sent_bytes for r in here.replicas.values() for s in r.settled)
        assert 0 < audited <= 0.17 * sent, "an eighth but for chance"
        assert all(r.accused == [] for r in here.replicas.values())
