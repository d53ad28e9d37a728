"""Dialling back over real sockets and TLS: who is there, who is not, and what an answer may say."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.generated import link_pb2 as wire
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.nat.dial_back import DialBackOutcome, DialBackResult, decode_dial_back, dial_back, encode_dial_back
from protocol.transport.grpc_streams import _host_of_caller
from swarm.vocabulary.errors import ProtocolViolation
from tests.protocol.transport.link_peers import Persona, node, two_nodes

HERE = "127.0.0.1"
STATUS = Question(QuestionAbout.STATUS)


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
        assert (await left.transport.ask(right.peer, STATUS, 10)) == b"status"


@pytest.mark.e2e
async def test_another_peer_at_the_port_is_found_out() -> None:
    async with node() as there:
        result = await dial_back(HERE, there.port, Persona().credentials.certificate_der)
        assert result.outcome is DialBackOutcome.ANOTHER


@pytest.mark.e2e
@pytest.mark.parametrize("says", [b"220 mail.example ESMTP\r\n", b"\x15\x03\x03\x00\x02\x02\x28"])
async def test_another_program_at_the_port_is_found_out_and_hears_only_a_greeting_of_tls(says: bytes) -> None:
    async with listener(says) as (port, heard):
        assert (await dial_back(HERE, port, Persona().credentials.certificate_der)).outcome is DialBackOutcome.ANOTHER
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
        await left.transport.ask(right.peer, STATUS, 10)
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
    with contextlib.suppress(ProtocolViolation):
        decode_dial_back(data)


@pytest.mark.parametrize(
    "lie",
    [
        {"outcome": 0},
        {"outcome": 99},
        {"host": ""},
        {"host": "victim.example"},
        {"host": "fe80::1%eth0"},
        {"outcome": 2, "detail": "x" * 257},
        {"host": "25.0.0.1" * 300},
    ],
)
def test_an_answer_that_makes_no_sense_is_a_violation(lie: dict[str, Any]) -> None:
    said = wire.DialBackResult(**{"host": "25.0.0.1", "outcome": 1, **lie})
    with pytest.raises(ProtocolViolation):
        decode_dial_back(said.SerializeToString())
