"""What a relaying peer carries, and every way in which it says no."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.frames.frames import decode
from protocol.generated import link_pb2 as wire
from protocol.generated import relay_pb2
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.libp2p.messages import MAX_MESSAGE_BYTES, RelayStream, answer
from protocol.nat import relay_client as attaching
from protocol.nat import relay_client as opening
from protocol.nat.dial_back import DialBackOutcome, DialBackResult, decode_dial_back, dial_back, encode_dial_back
from protocol.nat.relay_client import MAX_INCOMING, Attachment, Incoming, OpenTunnels
from protocol.nat.relay_server import HOUR_S, MIN_OPEN_BYTES, RelayBudget, RelayFigures, RelayLimits
from protocol.transport.grpc_streams import _host_of_caller
from protocol.transport.rate_limits import Allowance
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, ResourceExhausted, Unreachable
from tests.kit.waiting import until
from tests.protocol.dht.running import RUN
from tests.protocol.nat.relay_ends import (
    ANNA,
    BERT,
    CARL,
    PING,
    Ends,
    accept,
    attach,
    decline,
    relaying,
    stream_pair,
    wish,
)
from tests.protocol.transport.link_peers import Persona, connected, echo, node, two_nodes

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
        filled = await _fill(near)
        assert ends.service.figures().carried_bytes < 8 * 2**20
        near.writer.write(b"end")
        assert (await far.reader.readexactly(filled + 3))[-3:] == b"end"


@pytest.mark.parametrize("first", GARBAGE)
async def test_garbage_is_refused_at_the_beginning(first: bytes) -> None:
    async with relaying() as ends:
        stream = await ends.stream(ANNA)
        stream.writer.write(first)
        assert "relay:" in (await stream.hear()).answer.refused
        assert await stream.reader.read() == b""


@pytest.mark.parametrize("next_", GARBAGE)
async def test_garbage_ends_an_attachment(next_: bytes) -> None:
    async with relaying() as ends:
        stream = await ends.attached(ANNA)
        stream.writer.write(next_)
        assert "relay:" in (await stream.hear()).answer.refused
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
        assert "who is attached said" in (await stream.hear()).answer.refused


async def test_another_run_is_refused() -> None:
    async with relaying() as ends:
        await ends.attached(BERT)
        assert "another run" in await ends.refused(ANNA, attach("f" * 64))
        assert "another run" in await ends.refused(ANNA, wish(BERT, "f" * 64))
        assert ends.service.figures().refused == 2


async def test_silence_is_bounded() -> None:
    async with relaying(handshake_s=0.1, idle_s=0.2) as ends:
        assert "said nothing" in await ends.refused(ANNA)
        attachment = await ends.attached(BERT)
        assert await attachment.reader.read() == b"", "an attachment without pings is over"
        near, far = await ends.tunnel(ANNA, await ends.attached(BERT))
        assert await asyncio.gather(near.reader.read(), far.reader.read()) == [b"", b""]
        await until_idle(ends)


async def test_streams_that_say_nothing_are_bounded_for_each_peer_and_for_all() -> None:
    async with relaying(greeting=3, greeting_of_a_peer=2) as ends:
        silent = [await ends.stream(peer) for peer in (ANNA, ANNA)]
        assert "have not said" in await ends.refused(ANNA)
        silent.append(await ends.stream(BERT))
        assert "have not said" in await ends.refused(CARL)
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
        assert "often enough" in await ends.refused(ANNA, wish(BERT))
        await ends.tunnel(CARL, attachment)


async def test_only_who_is_attached_can_be_reached_and_nobody_reaches_itself() -> None:
    async with relaying() as ends:
        assert "not attached" in await ends.refused(ANNA, wish(BERT))
        await ends.attached(ANNA)
        assert "not attached" in await ends.refused(ANNA, wish(ANNA))


async def test_only_the_asked_peer_accepts_and_only_once() -> None:
    async with relaying() as ends:
        attachment = await ends.attached(BERT)
        near = await ends.said(ANNA, wish(BERT))
        incoming = (await attachment.hear()).incoming
        assert incoming.peer == ANNA
        assert "nobody waits" in await ends.refused(CARL, accept(incoming.number))
        assert "nobody waits" in await ends.refused(BERT, accept(incoming.number + 1))
        far = await ends.said(BERT, accept(incoming.number))
        assert (await far.hear()).answer.refused == ""
        assert (await near.hear()).answer.refused == ""
        assert "nobody waits" in await ends.refused(BERT, accept(incoming.number))
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
        assert "nobody waits" in await ends.refused(BERT, accept(number)), "too late"
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
        attachment = await ends.attached(BERT)
        near, far = await ends.tunnel(ANNA, attachment)
        near.writer.write(bytes(3 * MIN_OPEN_BYTES))
        await far.reader.read(-1)
        assert "used up" in await ends.refused(ANNA, wish(BERT))
        assert "used up" in await ends.refused(CARL, wish(BERT))
        assert ends.service.figures().carried_bytes <= 2 * MIN_OPEN_BYTES


Steps = st.lists(st.tuples(st.floats(0, 2000), st.integers(0, 600)), max_size=60)


@given(Steps)
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
    again = RelayBudget(RelayLimits(1000), lambda: 0.0, left=RelayFigures(left_bytes=250).left_bytes)
    assert again.left() == 250
    assert RelayBudget(RelayLimits(1000), lambda: 0.0, left=9999).left() == 500


def test_looking_at_an_allowance_takes_nothing() -> None:
    allowance = Allowance(burst=10, refill_s=1.0)
    assert allowance.left("x", 0.0) == 10
    assert allowance.take("x", 0.0, 8)
    assert [allowance.left("x", now) for now in (0.0, 3.0, 100.0)] == [2, 5, 10]


async def _fill(stream: RelayStream) -> int:
    """Writes until nothing more is taken; returns how many bytes."""
    filled = 0
    try:
        while True:
            stream.writer.write(bytes(65536))
            filled += 65536
            async with asyncio.timeout(0.5):
                await stream.writer.drain()
    except TimeoutError:
        return filled


async def until_idle(ends: Ends) -> None:
    await until(lambda: ends.service.figures().tunnels == 0)


RELAY = "the relay"


class Hostile:
    def __init__(self) -> None:
        self.streams: asyncio.Queue[RelayStream] = asyncio.Queue()
        self._all: list[RelayStream] = []

    async def dial(self, relay: str) -> RelayStream:
        ours, theirs = await stream_pair(BERT)
        self._all.append(theirs)
        self.streams.put_nowait(theirs)
        return ours

    async def heard(self) -> tuple[RelayStream, relay_pb2.RelayMessage]:
        stream = await self.streams.get()
        return stream, await stream.hear()

    def cut(self) -> None:
        for stream in self._all:
            stream.cut()


@asynccontextmanager
async def hostile() -> AsyncIterator[Hostile]:
    relay = Hostile()
    try:
        yield relay
    finally:
        relay.cut()


@asynccontextmanager
async def attached(relay: Hostile) -> AsyncIterator[tuple[Attachment, Incoming, RelayStream]]:
    """An attachment that stands, with its tunnels leading to an echo; and the relay's side of it."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    incoming = Incoming(("127.0.0.1", server.sockets[0].getsockname()[1]))
    attachment = Attachment(RELAY, RUN, relay.dial, incoming, jitter=lambda: 1.0, ping_s=0.05)
    async with server:
        keeping = asyncio.ensure_future(attachment.keep())
        try:
            stream, first = await relay.heard()
            assert first == attach()
            await stream.say(answer())
            yield attachment, incoming, stream
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))
            relay.cut()


def incoming_message(number: int) -> relay_pb2.RelayMessage:
    return relay_pb2.RelayMessage(incoming=relay_pb2.RelayIncoming(number=number, peer=ANNA))


async def test_an_attached_peer_pings_and_takes_what_comes() -> None:
    async with hostile() as relay, attached(relay) as (attachment, incoming, stream):
        assert await stream.hear() == PING
        assert attachment.standing
        await stream.say(incoming_message(7))
        far, first = await relay.heard()
        assert first.accept.number == 7
        await far.say(answer())
        far.writer.write(b"hello")
        assert await far.reader.readexactly(5) == b"hello"
        assert incoming.tunnels == 1
        far.cut()
        await until(lambda: incoming.tunnels == 0)


async def test_a_flood_of_incoming_tunnels_is_declined() -> None:
    async with hostile() as relay, attached(relay) as (_, incoming, stream):
        for number in range(MAX_INCOMING + 1):
            await stream.say(incoming_message(number))
        while (said := await stream.hear()) == PING:
            pass
        assert said.decline.number == MAX_INCOMING
        assert incoming.tunnels == MAX_INCOMING


async def test_a_relay_cannot_keep_a_peer_busy_with_tunnels_that_come_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attaching, "TAKEN_BURST", 2)
    async with hostile() as relay, attached(relay) as (_, incoming, stream):
        for number in range(2):
            await stream.say(incoming_message(number))
            (await relay.heard())[0].cut()
            await until(lambda: incoming.tunnels == 0)
        await stream.say(incoming_message(2))
        while (said := await stream.hear()) == PING:
            pass
        assert "for now" in said.decline.reason


@pytest.mark.parametrize("said", [attach(), answer("no"), relay_pb2.RelayMessage(decline=relay_pb2.RelayDecline())])
async def test_a_relay_that_breaks_the_rules_is_left_and_tried_again(said: relay_pb2.RelayMessage) -> None:
    async with hostile() as relay, attached(relay) as (attachment, _, stream):
        await stream.say(said)
        again, first = await relay.heard()
        assert first == attach()
        assert not attachment.standing
        assert "was said to an attached peer" in attachment.reason
        await again.say(answer("go\naway"))
        await until(lambda: attachment.reason == "the relay refused: go?away")


async def test_a_tunnel_that_the_relay_does_not_confirm_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attaching, "ANSWER_S", 0.1)
    async with hostile() as relay, attached(relay) as (attachment, incoming, stream):
        await stream.say(incoming_message(1))
        far, _ = await relay.heard()
        assert await far.reader.read() == b""
        await until(lambda: incoming.tunnels == 0)
        assert attachment.standing


@pytest.mark.parametrize(
    ("said", "error", "reason"),
    [
        (answer("no \x07bytes"), Rejected, r"refused: no \?bytes"),
        (PING, ProtocolViolation, "ping is no answer"),
        (None, Unreachable, "did not answer within"),
    ],
)
async def test_who_opens_hears_why_not(
    said: relay_pb2.RelayMessage | None, error: type[PeerError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "OPEN_S", 5.0 if said else 0.1)
    async with hostile() as relay, asyncio.TaskGroup() as tasks:
        wanted = tasks.create_task(_outcome(OpenTunnels(RUN, relay.dial, tasks)))
        stream, first = await relay.heard()
        assert (first.open.run, first.open.target) == (RUN, ANNA)
        if said is not None:
            await stream.say(said)
        assert await stream.reader.read() == b"", "nothing is left open"
        with pytest.raises(error, match=reason):
            raise await wanted


async def test_a_local_port_takes_one_connection_and_waits_for_it_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "TAKE_S", 0.3)
    async with hostile() as relay, asyncio.TaskGroup() as tasks:
        tunnels = OpenTunnels(RUN, relay.dial, tasks)
        port, stream = await _opened(tunnels, relay, tasks)
        async with connected(f"127.0.0.1:{port}") as (reader, writer):
            writer.write(b"x")
            assert await stream.reader.readexactly(1) == b"x"
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            stream.cut()
            assert await reader.read() == b""
        port, stream = await _opened(tunnels, relay, tasks)
        assert await stream.reader.read() == b"", "nobody came"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_opening_is_bounded() -> None:
    async with hostile() as relay, asyncio.TaskGroup() as tasks:
        tunnels = OpenTunnels(RUN, relay.dial, tasks)
        waiting = [tasks.create_task(_outcome(tunnels)) for _ in range(opening.MAX_OPENING)]
        streams = [(await relay.heard())[0] for _ in waiting]
        with pytest.raises(ResourceExhausted, match="being opened"):
            await tunnels.open(RELAY, ANNA)
        for stream in streams:
            stream.cut()
        assert all([isinstance(await outcome, Unreachable) for outcome in waiting])


async def _outcome(tunnels: OpenTunnels) -> BaseException:
    try:
        port = await tunnels.open(RELAY, ANNA)
    except PeerError as error:
        return error
    raise AssertionError(f"a tunnel was opened at {port}")


async def _opened(tunnels: OpenTunnels, relay: Hostile, tasks: asyncio.TaskGroup) -> tuple[int, RelayStream]:
    opened = tasks.create_task(tunnels.open(RELAY, ANNA))
    stream, _ = await relay.heard()
    await stream.say(answer())
    return await opened, stream


HERE = "127.0.0.1"


@asynccontextmanager
async def listener(says: bytes | None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A program that is no node: says its piece, or nothing, and notes what it hears until the other side goes."""
    heard: list[bytes] = []
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if says is not None:
            writer.write(says)
        heard.append(await reader.read())
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        gone.set()

    server = await asyncio.start_server(serve, HERE, 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard
        async with asyncio.timeout(10):
            await gone.wait()


@pytest.mark.e2e
async def test_a_node_is_reached_and_is_not_disturbed() -> None:
    async with two_nodes() as (left, right):
        certificate = right.persona.credentials.certificate_der
        assert await dial_back(HERE, right.port, certificate) == DialBackResult(HERE, DialBackOutcome.REACHED)
        assert right.handler.ups == [], "whoever dials back opens no link"
        assert (await left.transport.ask(right.peer, _status(), 10)) == b"status"


@pytest.mark.e2e
async def test_another_peer_at_the_port_is_found_out() -> None:
    async with node() as there:
        result = await dial_back(HERE, there.port, Persona().credentials.certificate_der)
        assert result.outcome is DialBackOutcome.ANOTHER


@pytest.mark.e2e
@pytest.mark.parametrize("says", [b"220 mail.example ESMTP\r\n", b"\x15\x03\x03\x00\x02\x02\x28"])
async def test_another_program_at_the_port_is_found_out_and_hears_only_a_greeting_of_tls(says: bytes) -> None:
    async with listener(says) as (port, heard):
        result = await dial_back(HERE, port, Persona().credentials.certificate_der)
        assert result.outcome is DialBackOutcome.ANOTHER
    assert heard[0][:2] == b"\x16\x03", "TLS's first record"
    assert len(heard[0]) < 2048


@pytest.mark.e2e
async def test_who_takes_the_connection_and_says_nothing_costs_the_time_limit_only() -> None:
    async with listener(None) as (port, _):
        result = await dial_back(HERE, port, b"", timeout_s=0.2)
    assert result.outcome is DialBackOutcome.SILENT


@pytest.mark.e2e
async def test_a_closed_port_is_told_from_a_silent_one() -> None:
    with socket.socket() as bound:
        bound.bind((HERE, 0))
        result = await dial_back(HERE, bound.getsockname()[1], b"")
    assert result.outcome is DialBackOutcome.CLOSED


@pytest.mark.parametrize("host", ["", "localhost", "victim.example", "127.0.0.1:80", "[::1]"])
async def test_nothing_but_an_ip_address_is_dialled(host: str) -> None:
    assert (await dial_back(host, 1, b"")).outcome is DialBackOutcome.NOT_TRIED


@pytest.mark.e2e
async def test_a_link_knows_its_far_end_whoever_dialled() -> None:
    async with two_nodes() as (left, right):
        assert left.transport.far_end(right.peer) is None
        await left.transport.ask(right.peer, _status(), 10)
        for own, other in ((left, right), (right, left)):
            end = own.transport.far_end(other.peer)
            assert end is not None
            assert (end.host, end.certificate) == (HERE, other.persona.credentials.certificate_der)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("ipv4:25.0.0.1:4002", "25.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:4002", "2001:db8::1"),
        ("ipv6:[::ffff:25.0.0.1]:4002", "25.0.0.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::1"),
        ("unix:/tmp/socket", ""),
        ("ipv4:nonsense", ""),
        ("", ""),
    ],
)
def test_the_host_in_grpcs_name_for_a_caller(name: str, host: str) -> None:
    assert _host_of_caller(name) == host


outcomes = st.sampled_from(DialBackOutcome)
hosts = st.ip_addresses().filter(lambda address: "%" not in str(address)).map(str)


@given(st.builds(DialBackResult, hosts, outcomes, st.text("abc é", max_size=256)))
def test_what_is_encoded_is_decoded_to_the_same(result: DialBackResult) -> None:
    assert decode_dial_back(encode_dial_back(result)) == result


@given(st.binary(max_size=200))
def test_garbage_is_a_violation_and_nothing_else(data: bytes) -> None:
    try:
        decode_dial_back(data)
    except ProtocolViolation:
        return


@pytest.mark.parametrize(
    "said",
    [
        wire.DialBackResult(host="25.0.0.1", outcome=0),  # type: ignore[arg-type]
        wire.DialBackResult(host="25.0.0.1", outcome=99),  # type: ignore[arg-type]
        wire.DialBackResult(host="", outcome=1),  # type: ignore[arg-type]
        wire.DialBackResult(host="victim.example", outcome=1),  # type: ignore[arg-type]
        wire.DialBackResult(host="fe80::1%eth0", outcome=1),  # type: ignore[arg-type]
        wire.DialBackResult(host="25.0.0.1", outcome=2, detail="x" * 257),  # type: ignore[arg-type]
        wire.DialBackResult(host="25.0.0.1" * 300, outcome=1),  # type: ignore[arg-type]
    ],
)
def test_an_answer_that_makes_no_sense_is_a_violation(said: wire.DialBackResult) -> None:
    with pytest.raises(ProtocolViolation):
        decode_dial_back(said.SerializeToString())


@pytest.mark.parametrize("port", [0, 65536, 2**32 - 1])
def test_a_port_that_does_not_exist_is_a_violation(port: int) -> None:
    question = wire.Question(id=1, dial_back=wire.DialBackQuestion(port=port))
    with pytest.raises(ProtocolViolation, match="port"):
        decode(wire.Frame(question=question).SerializeToString())


def _status() -> Question:
    return Question(QuestionAbout.STATUS)
