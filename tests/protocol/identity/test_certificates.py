"""A certificate proves a peer id, and nothing that differs from ours in a way that matters is believed."""

import hashlib
import random
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384

from protocol.identity.certificates import fingerprint, make_credentials, peer_of_certificate, pem_of
from protocol.identity.keys import Identity
from swarm.vocabulary.errors import ProtocolViolation
from tests.protocol.identity.minting import (
    LIBP2P_EXTENSION,
    OTHER_RUN,
    RUN,
    authority_key,
    authority_name,
    certificate,
    extension_for,
    new_key,
)

SPECIFICATION_CERTIFICATE = bytes.fromhex(
    "308201773082011ea003020102020900f5bd0debaa597f52300a06082a8648ce3d04030230003020170d3735303130313030303030"
    "305a180f34303936303130313030303030305a30003059301306072a8648ce3d020106082a8648ce3d030107034200046bf9871220"
    "d71dcb3483ecdfcbfcc7c103f8509d0974b3c18ab1f1be1302d643103a08f7a7722c1b247ba3876fe2c59e26526f479d7718a85202"
    "ddbe47562358a37f307d307b060a2b0601040183a25a01010101ff046a30680424080112207fda21856709c5ae12fd6e8450623f15f"
    "11955d384212b89f56e7e136d2e17280440aaa6bffabe91b6f30c35e3aa4f94b1188fed96b0ffdd393f4c58c1c047854120e674ce6"
    "4c788406d1c2c4b116581fd7411b309881c3c7f20b46e54c7e6fe7f0f300a06082a8648ce3d040302034700304402207d1a1dbd2bda2"
    "35ff2ec87daf006f9b04ba076a5a5530180cd9c2e8f6399e09d0220458527178c7e77024601dbb1b256593e9b96d961b96349d1f560"
    "114f61a87595"
)
SPECIFICATION_PEER = "12D3KooWJRSrypvnpHgc6ZAgyCni4KcSmbV7uGRaMw5LgMKT18fq"


def test_our_certificate_proves_our_peer_id_fits_a_record_shows_no_key_and_has_its_own_key_and_serial() -> None:
    identity = Identity.generate()
    credentials = make_credentials(identity, RUN)
    assert peer_of_certificate(credentials.certificate_der, RUN) == identity.peer
    assert peer_of_certificate(certificate(identity), RUN) == identity.peer, "and so do those of these tests"
    assert max(len(make_credentials(identity, RUN).certificate_der) for _ in range(20)) < 700
    assert pem_of(credentials.certificate_der) == credentials.certificate_pem
    assert fingerprint(credentials.certificate_der) == hashlib.sha256(credentials.certificate_der).digest()
    assert repr(credentials) == f"TlsCredentials(fingerprint={fingerprint(credentials.certificate_der).hex()})"
    for pem in (credentials.certificate_pem, credentials.authority_pem):
        ssl.create_default_context(cadata=pem.decode())
    first, second = (x509.load_der_x509_certificate(make_credentials(identity, RUN).certificate_der) for _ in range(2))
    assert first.serial_number != second.serial_number
    assert first.public_key() != second.public_key()


def test_the_extension_is_the_one_of_the_specification() -> None:
    """Its key and its extension, in a certificate whose signature and names are those of a run."""
    theirs = x509.load_der_x509_certificate(SPECIFICATION_CERTIFICATE)
    key = theirs.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    value = theirs.extensions.get_extension_for_oid(LIBP2P_EXTENSION).value.public_bytes()
    der = certificate(
        Identity.generate(),
        public_key=key,
        extension=x509.UnrecognizedExtension(LIBP2P_EXTENSION, value),
        names=(SPECIFICATION_PEER,),
        alternative=(SPECIFICATION_PEER,),
    )
    assert peer_of_certificate(der, RUN) == SPECIFICATION_PEER


def test_the_authority_of_a_run_has_the_documented_key_and_name_and_may_sign() -> None:
    pem = make_credentials(Identity.generate(), RUN).authority_pem
    authority = x509.load_pem_x509_certificate(pem)
    assert authority.public_key() == authority_key(RUN).public_key()
    assert authority.subject.rfc4514_string() == f"CN={authority_name(RUN)}"
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert authority.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert authority.public_key() != authority_key(OTHER_RUN).public_key()


ME, OTHER, KEY = Identity.generate(), Identity.generate(), new_key()

WRONG: dict[str, tuple[bytes, str]] = {
    "too large": (certificate(ME, padding=600), "more than the 1024 allowed"),
    "other curve": (certificate(ME, key=ec.generate_private_key(ec.SECP384R1())), "P-256"),
    "signed by another": (certificate(ME, signing_key=KEY), "not signed by this run's authority"),
    "signed by itself": (certificate(ME, key=KEY, signing_key=KEY, issuer=ME.peer), "not issued by this run"),
    "of another run": (make_credentials(ME, OTHER_RUN).certificate_der, "not issued by this run"),
    "signed for another run in this one's name": (
        certificate(ME, signing_key=authority_key(OTHER_RUN)),
        "not signed by this run's authority",
    ),
    "signed for this run in another's name": (
        certificate(ME, issuer=authority_name(OTHER_RUN)),
        "not issued by this run",
    ),
    "other digest": (certificate(ME, digest=SHA384()), "SHA-256"),
    "no extension": (certificate(ME, leave_out="libp2p"), "libp2p extension is missing"),
    "extension of another key": (certificate(ME, extension=extension_for(ME, KEY)), "extension's signature"),
    "extension for another purpose": (
        certificate(ME, key=KEY, extension=extension_for(ME, KEY, b"other:")),
        "extension's signature",
    ),
    "extension garbage": (
        certificate(ME, extension=x509.UnrecognizedExtension(LIBP2P_EXTENSION, bytes(106))),
        "not for an Ed25519",
    ),
    "extension too long": (
        certificate(
            ME, key=KEY, extension=x509.UnrecognizedExtension(LIBP2P_EXTENSION, extension_for(ME, KEY).value + b"\0")
        ),
        "not for an Ed25519",
    ),
    "another's name": (certificate(ME, names=(OTHER.peer,)), "common name"),
    "two names": (certificate(ME, names=(ME.peer, OTHER.peer)), "common name"),
    "authority": (certificate(ME, authority=True), "CA:TRUE"),
    "silent about authority": (certificate(ME, leave_out="constraints"), "are missing"),
    "signs others": (certificate(ME, may_sign_others=True), "key usage"),
    "silent about key usage": (certificate(ME, leave_out="usage"), "are missing"),
    "another's alternative name": (certificate(ME, alternative=(OTHER.peer,)), "alternative"),
    "a second alternative name": (certificate(ME, alternative=(ME.peer, OTHER.peer)), "alternative"),
    "no alternative name": (certificate(ME, leave_out="alternative"), "alternative names are missing"),
    "two certificates": (certificate(ME, leave_out="libp2p") * 2, "not one X.509"),
    "PEM": (make_credentials(ME, RUN).certificate_pem, "not one X.509"),
    "empty": (b"", "not one X.509"),
    "cut": (certificate(ME)[:-1], "not one X.509"),
}


@pytest.mark.parametrize(("der", "message"), WRONG.values(), ids=WRONG.keys())
def test_refused(der: bytes, message: str) -> None:
    with pytest.raises(ProtocolViolation, match=message):
        peer_of_certificate(der, RUN)


@pytest.mark.filterwarnings("ignore:Parsed a serial number which wasn't positive")
def test_a_change_of_any_byte_is_noticed_and_never_ends_in_another_error() -> None:
    der = make_credentials(Identity.generate(), RUN).certificate_der
    generator = random.Random(7)
    for position in range(len(der)):
        changed = bytearray(der)
        changed[position] ^= generator.randrange(1, 256)
        with pytest.raises(ProtocolViolation):
            peer_of_certificate(bytes(changed), RUN)
