"""Certificates of every kind, good and bad, made after docs/protocol.md without the code under test."""

import hashlib
from dataclasses import replace
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256, HashAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from protocol.identity.certificates import TlsCredentials, pem_of
from protocol.identity.keys import Identity
from swarm.vocabulary.types import RunId

RUN = RunId("5" * 64)
OTHER_RUN = RunId("6" * 64)
LIBP2P_EXTENSION = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
P256_ORDER = 2**256 - 2**224 + 2**192 - 0x4319055258E8617B0C46353D039CDAAF


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_in(credentials: TlsCredentials) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key(credentials.private_key_pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def authority_key(run: RunId) -> ec.EllipticCurvePrivateKey:
    digest = hashlib.sha256(f"skipstone-authority:{run}".encode()).hexdigest()
    return ec.derive_private_key(int(digest, 16) % (P256_ORDER - 1) + 1, ec.SECP256R1())


def authority_name(run: RunId) -> str:
    return f"skipstone run {run[:32]}"


def extension_for(
    identity: Identity, key: ec.EllipticCurvePrivateKey, purpose: bytes = b"libp2p-tls-handshake:"
) -> x509.UnrecognizedExtension:
    key_info = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    body = b"\x04\x24\x08\x01\x12\x20" + identity.public_key + b"\x04\x40" + identity.sign(purpose + key_info)
    return x509.UnrecognizedExtension(LIBP2P_EXTENSION, b"\x30" + bytes([len(body)]) + body)


def certificate(
    identity: Identity,
    *,
    key: ec.EllipticCurvePrivateKey | None = None,
    public_key: ec.EllipticCurvePublicKey | None = None,
    signing_key: ec.EllipticCurvePrivateKey | None = None,
    extension: x509.UnrecognizedExtension | None = None,
    names: tuple[str, ...] | None = None,
    issuer: str | None = None,
    alternative: tuple[str, ...] | None = None,
    authority: bool = False,
    may_sign_others: bool = False,
    digest: HashAlgorithm | None = None,
    padding: int = 0,
    leave_out: str = "",
) -> bytes:
    """DER. With nothing but the identity, as good as those of `make_credentials` in RUN."""
    key = key or new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names or (identity.peer,)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer or authority_name(RUN))]))
        .public_key(public_key or key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
    )
    if leave_out != "libp2p":
        builder = builder.add_extension(extension or extension_for(identity, key), critical=False)
    if leave_out != "constraints":
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    if leave_out != "usage":
        usage = x509.KeyUsage(True, False, False, False, False, may_sign_others, False, False, False)
        builder = builder.add_extension(usage, critical=True)
    if leave_out != "alternative":
        dns_names = [x509.DNSName(name) for name in alternative or (identity.peer,)]
        builder = builder.add_extension(x509.SubjectAlternativeName(dns_names), critical=False)
    if padding:
        oid = x509.ObjectIdentifier("1.3.6.1.4.1.53594.9.9")
        builder = builder.add_extension(x509.UnrecognizedExtension(oid, bytes(padding)), critical=False)
    return builder.sign(signing_key or authority_key(RUN), digest or SHA256()).public_bytes(Encoding.DER)


def credentials_for(der: bytes, key: ec.EllipticCurvePrivateKey, *chain: bytes, like: TlsCredentials) -> TlsCredentials:
    """What shows this certificate, with others after it, in a handshake, and is `like` these otherwise."""
    return replace(
        like,
        certificate_der=der,
        certificate_pem=b"".join(pem_of(certificate) for certificate in (der, *chain)),
        private_key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )
