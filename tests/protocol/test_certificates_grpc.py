"""Our certificates as gRPC uses them: each is a trust root of itself, in both directions, over real sockets."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from protocol.certificates import TlsCredentials, make_credentials, peer_of_certificate, pem_of
from protocol.identity import Identity
from swarm.vocabulary import PeerId

pytestmark = pytest.mark.e2e

METHOD = "/test.Service/Who"
DEADLINE_S = 10


async def _who(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    """Answers with the peer id that the caller's certificate proves."""
    pem = context.auth_context()["x509_pem_cert"][0]
    return peer_of_certificate(ssl.PEM_cert_to_DER_cert(pem.decode())).encode()


class Roots:
    """The certificates that a server lets in; may change while it runs."""

    def __init__(self, own: TlsCredentials, allowed: Iterable[TlsCredentials]) -> None:
        self.own = own
        self.allowed = [credentials.certificate_der for credentials in allowed]

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.own.private_key_pem, self.own.certificate_pem)],
            root_certificates=b"".join(pem_of(der) for der in self.allowed),
        )


@asynccontextmanager
async def server(roots: Roots) -> AsyncIterator[str]:
    instance = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(_who)
    instance.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Who": handler}),))
    credentials = grpc.dynamic_ssl_server_credentials(
        roots.configuration(), roots.configuration, require_client_authentication=True
    )
    port = instance.add_secure_port("127.0.0.1:0", credentials)
    await instance.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await instance.stop(None)


async def ask_who(address: str, own: TlsCredentials, root: bytes, name: PeerId) -> bytes:
    """Dials, expecting the certificate `root` (DER) under `name`."""
    credentials = grpc.ssl_channel_credentials(pem_of(root), own.private_key_pem, own.certificate_pem)
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_retries", 0)]
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        answer: bytes = await channel.unary_unary(METHOD)(b"", timeout=DEADLINE_S)
        return answer


async def assert_refused(address: str, own: TlsCredentials, root: bytes, name: PeerId) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask_who(address, own, root, name)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_handshake() -> None:
    server_identity, client_identity = Identity.generate(), Identity.generate()
    ours, theirs = make_credentials(server_identity), make_credentials(client_identity)
    async with server(Roots(ours, [theirs])) as address:
        answer = await ask_who(address, theirs, ours.certificate_der, server_identity.peer)
    assert answer.decode() == client_identity.peer


async def test_a_client_outside_the_roots_is_refused_until_it_is_let_in() -> None:
    server_identity, stranger_identity = Identity.generate(), Identity.generate()
    ours, friend, stranger = (make_credentials(i) for i in (server_identity, Identity.generate(), stranger_identity))
    roots = Roots(ours, [friend])
    async with server(roots) as address:
        await assert_refused(address, stranger, ours.certificate_der, server_identity.peer)
        roots.allowed.append(stranger.certificate_der)
        answer = await ask_who(address, stranger, ours.certificate_der, server_identity.peer)
    assert answer.decode() == stranger_identity.peer


async def test_a_server_with_another_certificate_or_name_is_refused() -> None:
    server_identity = Identity.generate()
    ours, again, theirs = (make_credentials(i) for i in (server_identity, server_identity, Identity.generate()))
    async with server(Roots(ours, [theirs])) as address:
        await assert_refused(address, theirs, again.certificate_der, server_identity.peer)
        await assert_refused(address, theirs, ours.certificate_der, Identity.generate().peer)


async def test_a_restarted_client_gets_in_beside_its_former_certificate() -> None:
    server_identity, client_identity = Identity.generate(), Identity.generate()
    ours, former, present = (make_credentials(i) for i in (server_identity, client_identity, client_identity))
    async with server(Roots(ours, [former, present])) as address:
        for credentials in (former, present):
            answer = await ask_who(address, credentials, ours.certificate_der, server_identity.peer)
            assert answer.decode() == client_identity.peer


async def test_a_certificate_in_the_roots_can_not_vouch_for_another() -> None:
    """The leaf is signed with a key that is in the roots. Of its extensions, the key usage is what stops this."""
    server_identity = Identity.generate()
    ours, friend = make_credentials(server_identity), make_credentials(Identity.generate())
    forged = _issued_by(friend, make_credentials(Identity.generate()))
    async with server(Roots(ours, [friend])) as address:
        await assert_refused(address, forged, ours.certificate_der, server_identity.peer)


def _issued_by(issuer: TlsCredentials, subject: TlsCredentials) -> TlsCredentials:
    """`subject`'s certificate, but signed with `issuer`'s key and in its name."""
    key = load_pem_private_key(issuer.private_key_pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    template = x509.load_der_x509_certificate(subject.certificate_der)
    builder = x509.CertificateBuilder(
        issuer_name=x509.load_der_x509_certificate(issuer.certificate_der).subject,
        subject_name=template.subject,
        public_key=template.public_key(),
        serial_number=template.serial_number,
        not_valid_before=template.not_valid_before_utc,
        not_valid_after=template.not_valid_after_utc,
        extensions=list(template.extensions),
    )
    certificate = builder.sign(key, SHA256())
    return TlsCredentials(
        certificate.public_bytes(Encoding.DER), certificate.public_bytes(Encoding.PEM), subject.private_key_pem
    )
