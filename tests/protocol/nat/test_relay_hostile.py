"""The two ends of a tunnel at a relay that lies, floods or says nothing: it can refuse its service, and no more."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protocol.generated import relay_pb2
from protocol.nat import relay as ends
from protocol.nat.relay import MAX_INCOMING, Attachment, Incoming, OpenTunnels, RelayStream, answer
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, ResourceExhausted, Unreachable
from tests.kit.waiting import until
from tests.protocol.dht.running import RUN
from tests.protocol.nat.relay_ends import ANNA, BERT, PING, attach, stream_pair
from tests.protocol.transport.link_peers import connected, echo

RELAY = "the relay"


class Hostile:
    """A relay whose messages the test writes: the ends call `dial`, `streams` are its sides of their streams."""

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


async def test_a_relay_cannot_keep_a_peer_busy_with_tunnels_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "TAKEN_BURST", 2)
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
        assert "was sent to an attached peer" in attachment.reason
        await again.say(answer("go\naway"))
        await until(lambda: attachment.reason == "the relay refused: go?away")


async def test_a_tunnel_that_the_relay_does_not_confirm_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "ANSWER_S", 0.1)
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
        (PING, ProtocolViolation, "ping is not an answer"),
        (None, Unreachable, "did not answer within"),
    ],
)
async def test_who_opens_hears_why_not(
    said: relay_pb2.RelayMessage | None, error: type[PeerError], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "OPEN_S", 5.0 if said else 0.1)
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
    monkeypatch.setattr(ends, "TAKE_S", 0.3)
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
        waiting = [tasks.create_task(_outcome(tunnels)) for _ in range(ends.MAX_OPENING)]
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
