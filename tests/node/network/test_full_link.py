"""A short link is completed by what its addresses prove, and by nothing else that they say."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from node.network.session import full_link
from protocol.identity.certificates import MAX_CERTIFICATE_BYTES, make_credentials, run_and_dht_port
from protocol.identity.keys import Identity
from protocol.manifest.join_link import short_link
from protocol.transport.grpc_streams import make_server
from protocol.transport.settings import joined
from swarm.vocabulary.errors import ProtocolViolation, Rejected, Unreachable
from swarm.vocabulary.types import PeerId, RunId

RUN = RunId("0123456789abcdef" * 4)
OTHER = RunId(RUN[:32] + "5c" * 16)


async def nothing(*_: object) -> None: ...


@asynccontextmanager
async def node(run: RunId, dht_port: int = 4002, host: str = "127.0.0.1") -> AsyncIterator[tuple[PeerId, str]]:
    identity = Identity.generate()
    server, port = make_server(nothing, make_credentials(identity, run, dht_port), joined(host, 0), 4)
    await server.start()
    try:
        yield identity.peer, joined(host, port)
    finally:
        await server.stop(None)


@pytest.mark.parametrize(("host", "kind"), [("127.0.0.1", "ip4"), ("::1", "ip6")])
async def test_the_first_node_that_answers_completes_it(host: str, kind: str) -> None:
    async with node(RUN, host=host) as (peer, address), node(OTHER) as (_, another):
        full = await full_link(short_link(RUN, ("127.0.0.1:1", another, address)), 5.0)
        assert (full.run, full.peers) == (RUN, (f"/{kind}/{host}/tcp/4002/p2p/{peer}",))
        assert await full_link(full, 0.0) == full


async def test_who_does_not_serve_the_run_is_refused_at_once() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.close()

    async with node(OTHER) as (_, address), node(RUN, dht_port=0) as (_, visitor):
        with pytest.raises(Rejected, match=f"{address} answers, and serves another run"):
            await full_link(short_link(RUN, (address,)), 60.0)
        with pytest.raises(Rejected, match="is not a Skipstone node"):
            await full_link(short_link(RUN, (visitor,)), 60.0)
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        with pytest.raises(Rejected, match="is not a Skipstone node"):
            await full_link(short_link(RUN, (f"127.0.0.1:{server.sockets[0].getsockname()[1]}",)), 60.0)


async def test_a_silent_address_and_a_closed_one_are_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.network.session.DIAL_BACK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(Unreachable, match=f"nobody answers at {silent}"):
            await full_link(short_link(RUN, (silent,)), 0.0)
    with pytest.raises(Unreachable, match=f"nobody answers at {silent}"):
        await full_link(short_link(RUN, (silent,)), 0.0)


@pytest.mark.parametrize("certificate", [b"", b"0" * 100, b"0" * (MAX_CERTIFICATE_BYTES + 1)])
def test_a_malformed_certificate_claims_no_run(certificate: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        run_and_dht_port(certificate, RUN[32:])
