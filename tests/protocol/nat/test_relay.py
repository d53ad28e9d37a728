"""What a relaying peer carries, and every way in which it says no."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.generated import relay_pb2
from protocol.nat.relay import HOUR_S, MAX_MESSAGE_BYTES, MIN_OPEN_BYTES, RelayBudget, RelayLimits, answer
from tests.kit.waiting import until
from tests.protocol.nat.relay_ends import ANNA, BERT, CARL, PING, Ends, accept, attach, decline, relaying, wish

GARBAGE = [
    b"\xff\xff" + bytes(100),
    (MAX_MESSAGE_BYTES + 1).to_bytes(2, "big"),
    b"\x00\x00",
    b"\x00\x02\xff\xff",
    b"\x00\x03\x0a\x01\x00",
    b"\x00\x04\x9a\x06\x01\x00",
]


async def test_a_tunnel_carries_both_ways_and_ends_for_both() -> None:
    async with relaying() as ends:
        near, far = await ends.tunnel(ANNA, await ends.attached(BERT))
        near.writer.write(b"there")
        far.writer.write(b"back")
        assert await far.reader.readexactly(5) == b"there"
        assert await near.reader.readexactly(4) == b"back"
        assert ends.service.figures().tunnels == 1
        far.writer.write(b"last")
        far.writer.close()
        assert await near.reader.read() == b"last", "what was written before the end arrives"
        assert ends.service.figures().carried_bytes == 13
        await until_idle(ends)


async def test_nothing_is_read_while_the_other_side_does_not_take_it() -> None:
    async with relaying() as ends:
        near, far = await ends.tunnel(ANNA, await ends.attached(BERT))
        filled = 0
        with suppress(TimeoutError):
            while True:
                near.writer.write(bytes(65536))
                filled += 65536
                async with asyncio.timeout(0.5):
                    await near.writer.drain()
        assert ends.service.figures().carried_bytes < 8 * 2**20
        near.writer.write(b"end")
        assert (await far.reader.readexactly(filled + 3))[-3:] == b"end"


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_garbage_ends_a_stream_at_its_beginning_and_when_attached(garbage: bytes) -> None:
    async with relaying() as ends:
        for stream in (await ends.stream(ANNA), await ends.attached(ANNA)):
            stream.writer.write(garbage)
            assert "relay:" in (await stream.hear()).answer.refused
            assert await stream.reader.read() == b""
        await until(lambda: ends.service.figures().attached == 0)


@pytest.mark.parametrize("first", [PING, answer(), decline(1, ""), relay_pb2.RelayMessage()])
async def test_a_stream_begins_with_a_wish(first: relay_pb2.RelayMessage) -> None:
    async with relaying() as ends:
        assert "relay:" in await ends.refused(ANNA, first)


@pytest.mark.parametrize("next_", [attach(), wish(BERT), accept(1), answer()])
async def test_who_is_attached_pings_or_declines(next_: relay_pb2.RelayMessage) -> None:
    async with relaying() as ends:
        stream = await ends.attached(ANNA)
        await stream.say(PING)
        assert (await stream.hear()).WhichOneof("kind") == "ping"
        await stream.say(next_)
        assert "an attached peer sent" in (await stream.hear()).answer.refused


async def test_another_run_is_refused_and_only_who_is_attached_can_be_reached_by_others() -> None:
    async with relaying() as ends:
        await ends.attached(BERT)
        assert "another run" in await ends.refused(ANNA, attach("f" * 64))
        assert "another run" in await ends.refused(ANNA, wish(BERT, "f" * 64))
        assert ends.service.figures().refused == 2
    async with relaying() as ends:
        assert "not attached" in await ends.refused(ANNA, wish(BERT))
        await ends.attached(ANNA)
        assert "not attached" in await ends.refused(ANNA, wish(ANNA))


async def test_silence_is_bounded() -> None:
    async with relaying(handshake_s=0.1, idle_s=0.2) as ends:
        assert "sent nothing" in await ends.refused(ANNA)
        assert await (await ends.attached(BERT)).reader.read() == b"", "an attachment without pings is over"
        near, far = await ends.tunnel(ANNA, await ends.attached(BERT))
        assert await asyncio.gather(near.reader.read(), far.reader.read()) == [b"", b""]
        await until_idle(ends)


async def test_streams_that_say_nothing_are_bounded_for_each_peer_and_for_all() -> None:
    async with relaying(greeting=3, greeting_of_a_peer=2) as ends:
        silent = [await ends.stream(peer) for peer in (ANNA, ANNA)]
        assert "have not sent" in await ends.refused(ANNA)
        silent.append(await ends.stream(BERT))
        assert "have not sent" in await ends.refused(CARL)
        for stream in silent:
            stream.cut()
        await until(lambda: ends.service._greeting.total() == 0)
        await ends.attached(CARL)


async def test_attachments_are_bounded_and_one_for_each_peer() -> None:
    async with relaying(attached=2) as ends:
        first = await ends.attached(ANNA)
        await ends.attached(BERT)
        assert "2 peers are attached" in await ends.refused(CARL, attach())
        second = await ends.attached(ANNA)
        assert await first.reader.read() == b"", "a newer attachment replaces the older one"
        near, _ = await ends.tunnel(BERT, second)
        assert near.peer == BERT
        assert ends.service.figures().attached == 2
        second.cut()
        await until(lambda: ends.service.figures().attached == 1)
        await ends.attached(CARL)


async def test_tunnels_are_bounded_for_each_peer_and_for_all() -> None:
    async with relaying(tunnels=3, tunnels_of_a_peer=2) as ends:
        attachment = await ends.attached(BERT)
        kept = [await ends.tunnel(ANNA, attachment) for _ in range(2)]
        assert "has 2 tunnels" in await ends.refused(ANNA, wish(BERT))
        kept.append(await ends.tunnel(CARL, attachment))
        assert "3 tunnels are open" in await ends.refused(CARL, wish(BERT))
        kept[0][0].cut()
        await until(lambda: ends.service.figures().tunnels == 2)
        await ends.tunnel(ANNA, attachment)


async def test_a_peer_cannot_open_and_end_tunnels_for_ever() -> None:
    async with relaying(opens=2, open_refill_s=3600.0) as ends:
        attachment = await ends.attached(BERT)
        for _ in range(2):
            near, _ = await ends.tunnel(ANNA, attachment)
            near.cut()
        await until_idle(ends)
        assert "too often" in await ends.refused(ANNA, wish(BERT))
        await ends.tunnel(CARL, attachment)


async def test_only_the_asked_peer_accepts_and_only_once() -> None:
    async with relaying() as ends:
        attachment = await ends.attached(BERT)
        near = await ends.said(ANNA, wish(BERT))
        incoming = (await attachment.hear()).incoming
        assert incoming.peer == ANNA
        assert "no tunnel has the number" in await ends.refused(CARL, accept(incoming.number))
        assert "no tunnel has the number" in await ends.refused(BERT, accept(incoming.number + 1))
        far = await ends.said(BERT, accept(incoming.number))
        assert (await far.hear()).answer.refused == ""
        assert (await near.hear()).answer.refused == ""
        assert "no tunnel has the number" in await ends.refused(BERT, accept(incoming.number))
        near.writer.write(b"x")
        assert await far.reader.readexactly(1) == b"x"


async def test_the_far_end_may_decline_or_not_answer() -> None:
    async with relaying(handshake_s=0.2) as ends:
        attachment, other = await ends.attached(BERT), await ends.attached(CARL)
        near = await ends.said(ANNA, wish(BERT))
        number = (await attachment.hear()).incoming.number
        await other.say(decline(number, "not Carl's to decline"))
        await other.say(PING)
        await other.hear()
        await attachment.say(decline(number, "full\x1b[31m"))
        assert (await near.hear()).answer.refused == "the far end declined: full?[31m"
        assert "did not accept" in await ends.refused(ANNA, wish(BERT))
        number = (await attachment.hear()).incoming.number
        assert "no tunnel has the number" in await ends.refused(BERT, accept(number)), "too late"
        assert ends.service.figures().tunnels == 0


async def test_bytes_over_the_share_of_a_pair_end_its_tunnel_and_leave_the_others() -> None:
    async with relaying(bytes_per_hour=8 * MIN_OPEN_BYTES, pair_share=0.5) as ends:
        attachment = await ends.attached(BERT)
        (near, far), (other, other_far) = await ends.tunnel(ANNA, attachment), await ends.tunnel(CARL, attachment)
        near.writer.write(bytes(2 * MIN_OPEN_BYTES + 1))
        assert len(await far.reader.read(-1)) <= 2 * MIN_OPEN_BYTES
        assert await near.reader.read() == b""
        assert "had their share" in await ends.refused(ANNA, wish(BERT))
        other.writer.write(b"x")
        assert await other_far.reader.readexactly(1) == b"x"
        assert ends.service.figures().cut_off == 1


async def test_bytes_over_the_hours_end_every_tunnel() -> None:
    async with relaying(bytes_per_hour=4 * MIN_OPEN_BYTES, pair_share=1.0) as ends:
        near, far = await ends.tunnel(ANNA, await ends.attached(BERT))
        near.writer.write(bytes(3 * MIN_OPEN_BYTES))
        await far.reader.read(-1)
        assert "used up" in await ends.refused(ANNA, wish(BERT))
        assert "used up" in await ends.refused(CARL, wish(BERT))
        assert ends.service.figures().carried_bytes <= 2 * MIN_OPEN_BYTES


@given(st.lists(st.tuples(st.floats(0, 2000), st.integers(0, 600)), max_size=60))
def test_in_no_hour_more_than_the_figure_is_spent(steps: list[tuple[float, int]]) -> None:
    now, spent = 0.0, []
    budget = RelayBudget(RelayLimits(1000, pair_share=1.0), lambda: now)
    for pause_s, amount in steps:
        now += pause_s
        if not budget.spend(ANNA, BERT, amount):
            spent.append((now, amount))
    for begin, _ in spent:
        assert sum(amount for at, amount in spent if begin <= at < begin + HOUR_S) <= 1000


def test_a_pair_is_the_same_from_both_sides_and_another_life_goes_on_where_the_last_ended() -> None:
    budget = RelayBudget(RelayLimits(1000, pair_share=0.5), lambda: 0.0)
    assert budget.spend(ANNA, BERT, 250) == ""
    assert "share" in budget.spend(BERT, ANNA, 1)
    assert (budget.left(), budget.pair_left(BERT, ANNA), budget.pair_left(BERT, CARL)) == (250, 0, 250)
    assert RelayBudget(RelayLimits(1000), lambda: 0.0, left=250).left() == 250
    assert RelayBudget(RelayLimits(1000), lambda: 0.0, left=9999).left() == 500


async def until_idle(ends: Ends) -> None:
    await until(lambda: ends.service.figures().tunnels == 0)
