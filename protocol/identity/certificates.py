"""TLS certificates that prove a peer id, signed by the run's authority.

gRPC's TLS does not support Ed25519. Therefore each process makes a P-256 key, signed by the identity in the libp2p TLS
extension (https://github.com/libp2p/specs/blob/master/tls/tls.md). The authority's key is derived from the RunId and
proves only knowledge of the run. A dialling peer trusts only the contact's certificate: `peer_of_certificate` rejects
one that may sign others. CA:FALSE is not enough: gRPC 1.85 accepts a leaf of a root unless its key usage excludes it.
"""

import functools
import hashlib
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from protocol.identity.keys import KEY_BYTES, LIBP2P_PUBLIC_KEY_PREFIX, Identity, peer_id_of, verify
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import SIGNATURE_BYTES, PeerId, RunId

MAX_CERTIFICATE_BYTES: Final = 1024  # DER. Ours have about 605 bytes. Must fit in a DHT record (2 KiB).

_LIBP2P_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
# A UUID as an OID (ITU-T X.667). The value is the port of the peer's DHT, 2 bytes, big-endian; 0 for none.
_DHT_PORT: Final = x509.ObjectIdentifier("2.25.287467389432718532412936017351294301953")
_AUTHORITY_NAME: Final = re.compile("skipstone run ([0-9a-f]{32})")
_SIGNATURE_PURPOSE: Final = b"libp2p-tls-handshake:"

# The extension's DER: SEQUENCE { OCTET STRING public key, OCTET STRING signature }. For an Ed25519 identity all lengths
# are fixed, and DER has one encoding, so a comparison of the fixed bytes is a complete parser.
_KEY_HEADER: Final = bytes.fromhex("30680424") + LIBP2P_PUBLIC_KEY_PREFIX
_SIGNATURE_HEADER: Final = bytes.fromhex("0440")

_SIGNS_HANDSHAKES_ONLY: Final = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
_SIGNS_CERTIFICATES_ONLY: Final = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
_P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

_MALFORMED: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True, slots=True, repr=False)
class TlsCredentials:
    """A peer's TLS certificate for a run, its private key, and the run's root certificate. The repr omits the key."""

    peer: PeerId
    run: RunId
    certificate_der: bytes
    certificate_pem: bytes
    private_key_pem: bytes
    authority_pem: bytes  # Root for the certificates of dialling peers

    def __repr__(self) -> str:
        return f"TlsCredentials(fingerprint={fingerprint(self.certificate_der).hex()})"


def make_credentials(identity: Identity, run: RunId, dht_port: int = 0) -> TlsCredentials:
    """Makes a P-256 key with a certificate that proves `identity.peer` to the peers of `run`."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority_key, authority = _authority(run)
    certificate = (
        _certificate(_name(identity.peer), authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_SIGNS_HANDSHAKES_ONLY, critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity.peer)]), critical=False)
        .add_extension(_libp2p_extension(identity, key.public_key()), critical=False)
        .add_extension(x509.UnrecognizedExtension(_DHT_PORT, dht_port.to_bytes(2, "big")), critical=False)
        .sign(authority_key, SHA256())
    )
    return TlsCredentials(
        peer=identity.peer,
        run=run,
        certificate_der=certificate.public_bytes(Encoding.DER),
        certificate_pem=certificate.public_bytes(Encoding.PEM),
        private_key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        authority_pem=authority.public_bytes(Encoding.PEM),
    )


def peer_of_certificate(der: bytes, run: RunId) -> PeerId:
    """Verifies a certificate for `run`, except for the dates, and returns its peer id. Raises ProtocolViolation."""
    try:
        certificate = _loaded(der)
        key = certificate.public_key()
        digest = certificate.signature_hash_algorithm
        extensions = certificate.extensions
        common_names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    except _MALFORMED as error:
        raise ProtocolViolation(f"certificate: not one X.509 certificate in DER: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ProtocolViolation("certificate: the key is not on the curve P-256")
    if not isinstance(digest, SHA256):
        raise ProtocolViolation("certificate: the signature is not ECDSA with SHA-256")
    try:
        certificate.verify_directly_issued_by(_authority(run)[1])
    except InvalidSignature:
        raise ProtocolViolation("certificate: not signed by this run's authority") from None
    except _MALFORMED as error:
        raise ProtocolViolation(f"certificate: not issued by this run's authority: {error}") from None
    peer = _proven_peer(extensions, key)
    if common_names != [peer]:
        raise ProtocolViolation(f"certificate: the common name is not {peer}, which the libp2p extension proves")
    _check_speaks_only_for(peer, extensions)
    return peer


def run_and_dht_port(der: bytes, second_half: str) -> tuple[RunId, int]:
    """Returns the RunId that a certificate claims, not verified, and the DHT's port. Raises ProtocolViolation."""
    try:
        certificate = _loaded(der)
        (name,) = certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
        port = certificate.extensions.get_extension_for_oid(_DHT_PORT).value.public_bytes()
    except (*_MALFORMED, x509.ExtensionNotFound) as error:
        raise ProtocolViolation(f"certificate: not a node's: {error}") from None
    issuer, dht_port = _AUTHORITY_NAME.fullmatch(str(name.value)), int.from_bytes(port[:2], "big")
    if issuer is None or not dht_port:
        raise ProtocolViolation("certificate: not from the authority of a run, or of a peer without a DHT port")
    return RunId(issuer[1] + second_half), dht_port


def _loaded(der: bytes) -> x509.Certificate:
    if len(der) > MAX_CERTIFICATE_BYTES:
        raise ProtocolViolation(f"certificate: {len(der)} bytes are more than the {MAX_CERTIFICATE_BYTES} allowed")
    return x509.load_der_x509_certificate(der)


def pem_of(der: bytes) -> bytes:
    return ssl.DER_cert_to_PEM_cert(der).encode()


def fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


@functools.lru_cache(maxsize=16)
def _authority(run: RunId) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Derives the run's root key and certificate from its RunId. The key is public, so its bias does not matter."""
    scalar = int.from_bytes(hashlib.sha256(b"skipstone-authority:" + run.encode()).digest(), "big")
    key = ec.derive_private_key(scalar % (_P256_ORDER - 1) + 1, ec.SECP256R1())
    name = _name(f"skipstone run {run[:32]}")
    certificate = (
        _certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_SIGNS_CERTIFICATES_ONLY, critical=True)
        .sign(key, SHA256())
    )
    return key, certificate


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Fixed dates, so that machines with wrong clocks can connect. The key ends with the process anyway.
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _libp2p_extension(identity: Identity, key: ec.EllipticCurvePublicKey) -> x509.UnrecognizedExtension:
    signature = identity.sign(_SIGNATURE_PURPOSE + _subject_public_key_info(key))
    return x509.UnrecognizedExtension(
        _LIBP2P_EXTENSION, _KEY_HEADER + identity.public_key + _SIGNATURE_HEADER + signature
    )


def _subject_public_key_info(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _proven_peer(extensions: x509.Extensions, key: ec.EllipticCurvePublicKey) -> PeerId:
    try:
        extension = extensions.get_extension_for_oid(_LIBP2P_EXTENSION).value
    except x509.ExtensionNotFound:
        raise ProtocolViolation("certificate: the libp2p extension is missing") from None
    value = extension.public_bytes()
    start = len(_KEY_HEADER) + KEY_BYTES
    end = start + len(_SIGNATURE_HEADER)
    well_formed = len(value) == end + SIGNATURE_BYTES
    if not (well_formed and value.startswith(_KEY_HEADER) and value[start:end] == _SIGNATURE_HEADER):
        raise ProtocolViolation("certificate: the libp2p extension is not for an Ed25519 identity")
    public_key, signature = value[len(_KEY_HEADER) : start], value[end:]
    if not verify(public_key, signature, _SIGNATURE_PURPOSE + _subject_public_key_info(key)):
        raise ProtocolViolation("certificate: the libp2p extension's signature does not verify")
    return peer_id_of(public_key)


def _check_speaks_only_for(peer: PeerId, extensions: x509.Extensions) -> None:
    try:
        is_authority = extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        names = list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        raise ProtocolViolation("certificate: basic constraints, key usage or alternative names are missing") from None
    if is_authority:
        raise ProtocolViolation("certificate: it claims to be an authority (CA:TRUE)")
    if usage != _SIGNS_HANDSHAKES_ONLY:
        raise ProtocolViolation("certificate: the key usage is not only digitalSignature")
    if names != [x509.DNSName(peer)]:
        raise ProtocolViolation(f"certificate: the alternative names are not exactly {peer}")
