"""A block ends where its microbatches are full."""

from __future__ import annotations

import random

from swarm.workload.packing import Room, pack, pack_and_end

ROOM = Room(4096, 16_384, 1 / 3000)


def test_what_would_leave_a_microbatch_half_empty_goes_into_the_next_block() -> None:
    packing, taken = pack_and_end([4096] * 254, (), ROOM)
    assert taken == 252
    assert {len(of) for of in packing.microbatches} == {4}
    assert len(pack([4096] * 254, (), ROOM).microbatches) == len(packing.microbatches) + 1


def test_all_documents_are_of_the_block_where_they_fill_it() -> None:
    lengths = [random.Random(1).randint(20, 1500) for _ in range(600)]
    packing, taken = pack_and_end(lengths, (), ROOM)
    assert (packing, taken) == (pack(lengths, (), ROOM), 600)


def test_what_is_packed_is_what_would_be_packed_of_those_alone() -> None:
    chance = random.Random(4)
    for _ in range(20):
        lengths = [chance.choice((51, 3001, 4001, 9000)) for _ in range(chance.randint(1, 250))]
        cut = [index for index, length in enumerate(lengths) if length > ROOM.sequence]
        packing, taken = pack_and_end(lengths, cut, ROOM, 25_000.0)
        assert sum(lengths[taken:]) <= ROOM.tokens
        assert packing == pack(lengths[:taken], [index for index in cut if index < taken], ROOM, 25_000.0)


def test_no_documents_and_one() -> None:
    assert pack_and_end([], (), ROOM)[1] == 0
    assert pack_and_end([1], (), ROOM)[1] == 1
