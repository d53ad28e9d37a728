"""Our certificates in gRPC's handshakes, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protocol.identity.certificates import TlsCredentials, make_credentials
from protocol.identity.keys import Identity
from protocol.interfaces.transport import Contact
from protocol.transport import grpc_streams
from protocol.transport.grpc_streams import METHOD, SERVICE, DialledStream, open_channel
from protocol.transport.handshake import proven_peer
from swarm.vocabulary.errors import Rejected, Unreachable
from swarm.vocabulary.types import PeerId
from tests.protocol.identity.minting import OTHER_RUN, RUN, authority_key, certificate, credentials_for, key_in, new_key

pytestmark = pytest.mark.e2e

DEADLINE_S = 20
AT_ONCE = 40
ROUNDS = 8


@asynccontextmanager
async def server(own: TlsCredentials) -> AsyncIterator[str]:
    """The transport's server, where each caller is told the peer id that its certificate proves."""

    async def serve(_requests: object, context: grpc_streams.ServicerContext) -> None:
        stream = grpc_streams.AcceptedStream(context)
        await stream.read()
        await stream.write(proven_peer(stream.certificate(), RUN).encode())

    instance, port = grpc_streams.make_server(serve, own, "127.0.0.1:0", 2 * AT_ONCE)
    await instance.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await instance.stop(None)


async def who_am_i(address: str, own: TlsCredentials, expected: PeerId, pinned: TlsCredentials) -> PeerId:
    stream = DialledStream(open_channel(Contact(expected, (address,), pinned.certificate_der), address, own))
    try:
        async with asyncio.timeout(DEADLINE_S):
            await stream.write(b"who am I?")
            answer = await stream.read()
    finally:
        await stream.close()
    assert answer is not None
    return PeerId(answer.decode())


async def refused(address: str, own: TlsCredentials, expected: PeerId, pinned: TlsCredentials) -> None:
    with pytest.raises(Rejected, match="another peer"):
        await who_am_i(address, own, expected, pinned)


HOST, CALLER = Identity.generate(), Identity.generate()
OURS, THEIRS = make_credentials(HOST, RUN), make_credentials(CALLER, RUN)


async def test_a_restarted_caller_gets_in_beside_its_former_certificate() -> None:
    async with server(OURS) as address:
        for credentials in (THEIRS, make_credentials(CALLER, RUN), THEIRS):
            assert await who_am_i(address, credentials, HOST.peer, OURS) == CALLER.peer


async def test_a_caller_without_a_certificate_is_refused() -> None:
    trusting = grpc.ssl_channel_credentials(OURS.certificate_pem)
    options = [("grpc.ssl_target_name_override", HOST.peer), ("grpc.enable_retries", 0)]
    async with server(OURS) as address, grpc.aio.secure_channel(address, trusting, options=options) as channel:
        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(timeout=DEADLINE_S)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("case", ["of another run", "signed by a peer", "with the chain"])
async def test_a_certificate_for_another_run_or_signed_by_a_peer_is_refused(case: str) -> None:
    """The peer that signed it was itself let in by the run's authority, and its certificate may come along."""
    shown, key = make_credentials(CALLER, OTHER_RUN), new_key()
    if case != "of another run":
        leaf = certificate(Identity.generate(), key=key, signing_key=key_in(THEIRS), issuer=CALLER.peer)
        shown = credentials_for(leaf, key, *[THEIRS.certificate_der] * (case == "with the chain"), like=OURS)
    async with server(OURS) as address:
        with pytest.raises(Unreachable, match="closed the connection"):
            await who_am_i(address, shown, HOST.peer, OURS)


async def test_a_host_with_another_certificate_name_or_run_is_refused_until_the_new_one_is_known() -> None:
    async with server(OURS) as address:
        other = make_credentials(Identity.generate(), RUN)
        await refused(address, THEIRS, HOST.peer, other)
        await refused(address, THEIRS, Identity.generate().peer, OURS)
    async with server(make_credentials(HOST, OTHER_RUN)) as address:
        await refused(address, THEIRS, HOST.peer, OURS)
    anew = make_credentials(HOST, RUN)
    async with server(anew) as address:
        await refused(address, THEIRS, HOST.peer, OURS)
        assert await who_am_i(address, THEIRS, HOST.peer, anew) == CALLER.peer


@pytest.mark.parametrize("signer", ["authority", "pinned peer"])
async def test_nobody_can_make_a_certificate_that_passes_for_the_pinned_one(signer: str) -> None:
    key, authority = new_key(), signer == "authority"
    leaf = certificate(
        HOST,
        key=key,
        signing_key=authority_key(RUN) if authority else key_in(OURS),
        issuer=None if authority else HOST.peer,
    )
    posing = credentials_for(leaf, key, OURS.certificate_der, like=OURS)
    async with server(posing) as address:
        await refused(address, THEIRS, HOST.peer, OURS)


async def test_many_handshakes_at_once_of_which_half_fail_leave_the_server_alive() -> None:
    callers = [Identity.generate() for _ in range(AT_ONCE)]
    runs = [RUN, OTHER_RUN] * (AT_ONCE // 2)
    async with server(OURS) as address:
        for _ in range(ROUNDS):
            shown = [make_credentials(caller, run) for caller, run in zip(callers, runs, strict=True)]
            answers = await asyncio.gather(
                *(who_am_i(address, credentials, HOST.peer, OURS) for credentials in shown), return_exceptions=True
            )
            for caller, run, answer in zip(callers, runs, answers, strict=True):
                assert answer == caller.peer if run == RUN else isinstance(answer, Unreachable), answer
        assert await who_am_i(address, THEIRS, HOST.peer, OURS) == CALLER.peer
