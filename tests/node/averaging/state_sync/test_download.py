"""Catching up over real links: mutual TLS, real donors, faults between a donor and its transport."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from node.averaging.anchor.anchor import Anchor, AnchorStore, hash_all, version_of
from node.averaging.state_sync import download as downloads
from protocol.frames.frames import HashList, encode_hash_list
from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Question, QuestionAbout, Transport
from swarm.vocabulary import errors
from swarm.vocabulary.averaging_messages import StateChunk, StateRefusal, StateRequest
from swarm.vocabulary.types import Codec, ModuleId, PeerId
from tests.node.averaging.state_peers import MODULE, Faults, StatePeer, state_swarm
from tests.node.checkpoint.saved_states import small_layout, state, written
from tests.node.network.small_swarm import ManualClock, until

LAYOUT = small_layout()
CHUNKS = 2 * LAYOUT.chunks
ANCHOR = state(3)
ASKER = PeerId("asker")
NOWHERE = cast(Transport, None)


def same(got: Anchor, wanted: Anchor) -> bool:
    return (
        got.version == wanted.version
        and got.hashes == wanted.hashes == hash_all(LAYOUT, got.parameters, got.momentum)
        and np.array_equal(got.parameters, wanted.parameters)
        and np.array_equal(got.momentum, wanted.momentum)
    )


async def fetch(joiner: StatePeer, *donors: StatePeer, known: Anchor | None = None) -> Anchor:
    return await joiner.downloads.catch_up(ANCHOR.version, [donor.peer for donor in donors], known)


async def test_the_state_comes_from_several_donors_at_once_bit_for_bit():
    async with state_swarm(LAYOUT) as swarm:
        donors = [await swarm.donor(ANCHOR) for _ in range(3)]
        joiner = await swarm.joiner()
        assert same(await fetch(joiner, *donors), ANCHOR)
        sent = [chunk for donor in donors for chunk in donor.faults.sent]
        assert set(sent) == set(range(CHUNKS))
        assert all(donor.faults.sent for donor in donors)
        assert joiner.progress[0] == (0, 8 * LAYOUT.elements)
        assert joiner.progress[-1] == (8 * LAYOUT.elements, 8 * LAYOUT.elements)
        assert joiner.progress == sorted(joiner.progress)


@pytest.mark.parametrize("lies", [{"corrupt": True}, {"garble": True}])
async def test_a_donor_of_wrong_chunks_is_found_out_and_the_others_do_its_part(lies: dict[str, Any]):
    async with state_swarm(LAYOUT) as swarm:
        liar, honest = await swarm.donor(ANCHOR, Faults(**lies)), await swarm.donor(ANCHOR)
        joiner = await swarm.joiner()
        assert same(await fetch(joiner, liar, honest), ANCHOR)
        assert [peer for peer, _ in joiner.liars] == [liar.peer]
        assert not joiner.handler.downs
        assert joiner.downloads.received_bytes == {honest.peer: 8 * LAYOUT.elements}


async def test_when_all_donors_lie_nothing_is_taken():
    async with state_swarm(LAYOUT) as swarm:
        liars = [await swarm.donor(ANCHOR, Faults(corrupt=True)) for _ in range(2)]
        joiner = await swarm.joiner()
        with pytest.raises(errors.NoQuorum, match="does not match its hash"):
            await fetch(joiner, *liars)
        assert {peer for peer, _ in joiner.liars} == {liar.peer for liar in liars}


async def test_a_donor_that_goes_on_to_later_rounds_still_serves_what_was_begun():
    async with state_swarm(LAYOUT) as swarm:
        donor = await swarm.donor(written(ANCHOR, *downloads.FreshSpace(LAYOUT).spare()), Faults(freeze_after=5))
        fetching = asyncio.create_task(fetch(await swarm.joiner(), donor))
        await until(lambda: not donor.faults.gate.is_set())
        for number in range(4, 8):
            donor.store.put(written(state(number), *donor.store.spare()))
        donor.faults.gate.set()
        assert same(await fetching, ANCHOR)


async def test_a_state_that_is_gone_is_no_quorum_and_donors_that_cannot_be_reached_are_named():
    async with state_swarm(LAYOUT) as swarm:
        donor, joiner = await swarm.donor(state(9)), await swarm.joiner()
        with pytest.raises(errors.NoQuorum, match="does not have state"):
            await fetch(joiner, donor)
    async with state_swarm(LAYOUT) as swarm:
        donor, joiner = await swarm.donor(ANCHOR), await swarm.joiner()
        await donor.vanish()
        with pytest.raises(errors.Stalled, match=donor.peer[-6:]):
            await fetch(joiner, donor)


async def test_arrays_of_fragments_in_common_with_a_known_anchor_are_shared():
    layout = small_layout(fragments=4)
    known = state(1, layout)
    _, end = layout.fragments[2]
    moved = known.parameters.copy()
    moved[layout.range_of(end - 1, end)][:] += 1.0
    hashes = hash_all(layout, moved, known.momentum)
    wanted = Anchor(layout, version_of(layout, hashes, 2, 20, 2000, 0), moved, known.momentum.copy(), hashes)
    async with state_swarm(layout) as swarm:
        donor, joiner = await swarm.donor(wanted), await swarm.joiner()
        got = await joiner.downloads.catch_up(wanted.version, [donor.peer], known)
        assert set(donor.faults.sent) == {end - 1}
        own = [place for place in range(4) if got.parameters.arrays[place] is not known.parameters.arrays[place]]
        assert own == [2]
        assert all(ours is theirs for ours, theirs in zip(got.momentum.arrays, known.momentum.arrays, strict=True))
        assert hash_all(layout, got.parameters, got.momentum) == wanted.hashes


async def test_sizes_are_checked_against_our_own_layout_before_memory_is_spent():
    class NoSpace:
        layout = LAYOUT

        def spare(self):
            raise AssertionError("memory was asked for")

        def give_back(self, parameters, momentum) -> None:
            return

    giant = encode_hash_list(HashList(ANCHOR.version, 2**40, 2**40, ANCHOR.hashes))
    async with state_swarm(LAYOUT) as swarm:
        liar = await swarm.donor(ANCHOR, Faults(lies_about_hashes=giant))
        joiner = await swarm.joiner(space=NoSpace())
        with pytest.raises(errors.NoQuorum):
            await fetch(joiner, liar)
        assert [peer for peer, _ in joiner.liars] == [liar.peer]


async def test_a_hash_list_that_the_digest_does_not_prove_is_refused_and_the_next_one_used():
    forged = encode_hash_list(HashList(ANCHOR.version, LAYOUT.elements, LAYOUT.chunk_elements, state(4).hashes))
    async with state_swarm(LAYOUT) as swarm:
        liar, honest = await swarm.donor(state(4), Faults(lies_about_hashes=forged)), await swarm.donor(ANCHOR)
        assert same(await fetch(await swarm.joiner(), liar, honest), ANCHOR)


async def test_a_chunk_of_another_size_ends_the_link_and_the_download_goes_on():
    async with state_swarm(LAYOUT) as swarm:
        giant, honest = await swarm.donor(ANCHOR), await swarm.donor(ANCHOR)
        giant.faults.gate.clear()
        honest.faults.gate.clear()
        joiner = await swarm.joiner()
        fetching = asyncio.create_task(fetch(joiner, giant, honest))
        _, chunk, _ = await asked(joiner, giant)
        message = StateChunk(MODULE, ANCHOR.version.digest, chunk)
        tensor = TensorSpec((2**26,), DType.FLOAT32)
        with pytest.raises(errors.PeerError):
            await giant.transport.send(joiner.peer, message, tensor, memoryview(bytearray(tensor.byte_length)))
        honest.faults.gate.set()
        assert same(await fetching, ANCHOR)
        assert [peer for peer, _ in joiner.liars] == [giant.peer]


async def test_a_chunk_that_breaks_off_is_fetched_again():
    async with state_swarm(LAYOUT) as swarm:
        donor, joiner = await swarm.donor(ANCHOR), await swarm.joiner()
        donor.faults.gate.clear()
        fetching = asyncio.create_task(fetch(joiner, donor))
        download, chunk, elements = await asked(joiner, donor)
        message, tensor = StateChunk(MODULE, ANCHOR.version.digest, chunk), TensorSpec((elements,), DType.FLOAT32)
        buffer = download.admit(donor.peer, message, tensor)
        assert isinstance(buffer, memoryview)
        buffer[:100] = bytes(100)
        download.broken_off(donor.peer, message, buffer)
        download.received(donor.peer, message, tensor, buffer)  # of no transfer that is under way: nothing happens
        assert download_of(joiner)._pool.in_use == 0
        donor.faults.gate.set()
        assert same(await fetching, ANCHOR)


async def test_a_flood_of_requests_is_bounded_and_others_are_served():
    async with state_swarm(LAYOUT) as swarm:
        donor, flooder, joiner = await swarm.donor(ANCHOR), await swarm.joiner(), await swarm.joiner()
        donor.faults.gate.clear()
        for _ in range(200):
            chunks = tuple(range(16))
            await flooder.transport.send_control(donor.peer, StateRequest(MODULE, ANCHOR.version.digest, chunks))
        await until(lambda: donor.faults.refused)
        assert all(len(queue) <= downloads.CHUNKS_OF_ONE for queue in donor.donor._askers.values())
        assert all(refused.reason is StateRefusal.BUSY for refused in donor.faults.refused)
        donor.faults.gate.set()
        assert same(await fetch(joiner, donor), ANCHOR)


async def test_requests_for_what_is_not_there_are_answered_with_gone():
    async with state_swarm(LAYOUT) as swarm:
        donor, asker = await swarm.donor(ANCHOR), await swarm.joiner()
        await asker.transport.send_control(donor.peer, StateRequest(MODULE, ANCHOR.version.digest, (0, CHUNKS)))
        await asker.transport.send_control(donor.peer, StateRequest(MODULE, b"?" * 32, (0,)))
        await until(lambda: len(donor.faults.refused) == 2)
        assert {refused.reason for refused in donor.faults.refused} == {StateRefusal.GONE}
        assert not donor.faults.sent


async def test_a_cancelled_download_gives_its_vectors_back():
    store = AnchorStore(state(1))
    async with state_swarm(LAYOUT) as swarm:
        donor, joiner = await swarm.donor(ANCHOR, Faults(freeze_after=4)), await swarm.joiner(space=store)
        fetching = asyncio.create_task(fetch(joiner, donor))
        await until(lambda: not donor.faults.gate.is_set())
        with pytest.raises(errors.SkipstoneError):
            await fetch(joiner, donor)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        lent = [store.spare(), store.spare()]
        with pytest.raises(errors.ResourceExhausted):
            store.spare()
        store.give_back(*lent[0])
        donor.faults.gate.set()
        assert same(await fetch(joiner, donor), ANCHOR)


async def test_a_reader_cannot_keep_a_state_for_ever():
    clock = ManualClock()
    store = AnchorStore(state(0), clock.monotonic)
    donor = downloads.Donor(MODULE, store, clock, NOWHERE)
    question = Question(QuestionAbout.STATE, module=MODULE, digest=store.current.version.digest)
    kept_s = 0.0
    for number in range(1, 100):
        if store.get(question.digest) is None:
            break
        await donor.answer(ASKER, question)
        store.put(written(state(number), *store.spare()))
        clock.now += 30.0
        kept_s += 30.0
    with pytest.raises(errors.Rejected):
        await donor.answer(ASKER, question)
    assert downloads.LONGEST_LEASE_S <= kept_s <= downloads.LONGEST_LEASE_S + downloads.LEASE_S + 60.0


async def test_a_donor_of_another_module_gives_nothing():
    donor = downloads.Donor(ModuleId(7), AnchorStore(ANCHOR), ManualClock(), NOWHERE)
    with pytest.raises(errors.Rejected, match=r"module 1\.0"):
        await donor.answer(ASKER, Question(QuestionAbout.STATE, module=MODULE, digest=ANCHOR.version.digest))


@pytest.mark.parametrize("codec", [Codec.BF16, Codec.INT8])
async def test_state_with_a_codec_gets_no_buffer(codec: Codec):
    async with state_swarm(LAYOUT) as swarm:
        donor, joiner = await swarm.donor(ANCHOR), await swarm.joiner()
        donor.faults.gate.clear()
        fetching = asyncio.create_task(fetch(joiner, donor))
        download, chunk, elements = await asked(joiner, donor)
        message = StateChunk(MODULE, ANCHOR.version.digest, chunk)
        with pytest.raises(errors.ProtocolViolation, match="this run does not allow"):
            download.admit(donor.peer, message, TensorSpec((elements,), DType.FLOAT32, codec))
        assert download_of(joiner)._pool.in_use == 0
        donor.faults.gate.set()
        with pytest.raises(errors.NoQuorum):
            await fetching


async def asked(joiner: StatePeer, donor: StatePeer) -> tuple[downloads._Download, int, int]:
    """The joiner's download, a chunk that it has asked the donor for, and how many elements that has."""
    await until(lambda: donor.donor._askers)
    download = download_of(joiner)
    chunk = next(c for c in range(CHUNKS) if download._plan.expects(donor.peer, c))
    return download, chunk, len(ANCHOR.chunk(chunk)) // 4


def download_of(joiner: StatePeer) -> downloads._Download:
    return cast(downloads._Download, joiner.handler._tensors[StateChunk])
