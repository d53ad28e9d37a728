"""A node's identity: an Ed25519 key in a file, and its libp2p peer id, which contains the public key."""

import os
import secrets
import shlex
import stat
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from swarm.vocabulary.errors import IdentityError, ProtocolViolation
from swarm.vocabulary.types import SIGNATURE_BYTES, PeerId, RunId

KEY_BYTES: Final = 32
MAX_KEY_FILE_BYTES: Final = 4096

LIBP2P_PUBLIC_KEY_PREFIX: Final = bytes.fromhex("08011220")  # libp2p PublicKey protobuf: type 1 (Ed25519), 32 bytes
_IDENTITY_MULTIHASH_PREFIX: Final = bytes.fromhex("0024")


class Identity:
    """A node's private key. The repr shows only the peer id."""

    __slots__ = ("_key", "peer", "public_key")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes_raw()
        self.peer = peer_id_of(self.public_key)

    @classmethod
    def generate(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the key file. Raises IdentityError if it is missing, accessible to other users, or damaged."""
        try:
            return cls(_parse_key(_read_private_file(path), path))
        except FileNotFoundError:
            raise IdentityError(
                f"there is no identity key at {path}", hint="Name the right file with --identity, or create a new key."
            ) from None

    @classmethod
    def create(cls, path: Path) -> Self:
        """Generates a key and saves it in a new file, in a folder of mode 0700. Raises IdentityError."""
        identity = cls.generate()
        pem = identity._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        try:
            _make_private_folders(path.parent)
            _write_private_file(path, pem)
        except FileExistsError:
            raise IdentityError(
                f"{path} exists already and is not overwritten", hint="Name another file, or move that one away first."
            ) from None
        except OSError as error:
            raise _unusable(path, error) from error
        return identity

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Loads the identity, or creates it if there is no file. Raises as `load` and `create`."""
        if not os.path.lexists(path):
            try:
                return cls.create(path)
            except IdentityError:
                if not os.path.lexists(path):  # Another process may have created it meanwhile. Then use that one
                    raise
        return cls.load(path)

    def for_run(self, run: RunId) -> "Identity":
        """Derives the key of one run with HKDF (RFC 5869), so that peers do not recognize it in other runs."""
        return self._derived(b"skipstone-run:1\0" + bytes.fromhex(run))

    def for_module(self, number: int) -> "Identity":
        """Derives the key of the module that a node hosts as its `number`th, from 1, beside its first one."""
        return self._derived(b"skipstone-module:1\0" + bytes((number,)))

    def _derived(self, purpose: bytes) -> "Identity":
        hkdf = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=purpose)
        return Identity(Ed25519PrivateKey.from_private_bytes(hkdf.derive(self._key.private_bytes_raw())))

    def sign(self, data: bytes) -> bytes:
        """Signs `data` with Ed25519 (RFC 8032). `data` must begin with its purpose, so that signatures have one use."""
        return self._key.sign(data)

    def libp2p_private_key(self) -> bytes:
        """Returns libp2p's PrivateKey protobuf (68 bytes, secret), the format of `p2pd`'s identity file."""
        return bytes.fromhex("08011240") + self._key.private_bytes_raw() + self.public_key

    def __repr__(self) -> str:
        return f"Identity({self.peer})"


def peer_id_of(public_key: bytes) -> PeerId:
    """Returns the peer id of a raw Ed25519 public key. Raises ProtocolViolation unless it has 32 bytes."""
    if len(public_key) != KEY_BYTES:
        raise ProtocolViolation(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return PeerId(base58.b58encode(_IDENTITY_MULTIHASH_PREFIX + LIBP2P_PUBLIC_KEY_PREFIX + public_key).decode())


@lru_cache(4096)  # decoding base58 takes half as long as verifying a signature
def public_key_of(peer: PeerId) -> bytes:
    """Returns the raw Ed25519 public key in a peer id. Raises ProtocolViolation if the peer id has another form."""
    prefix = _IDENTITY_MULTIHASH_PREFIX + LIBP2P_PUBLIC_KEY_PREFIX
    if len(peer) == 52:  # check the length first, because base58 decoding takes quadratic time
        try:
            decoded = base58.b58decode(peer)
        except ValueError:
            decoded = b""
        key = decoded[len(prefix) :]
        if decoded.startswith(prefix) and len(key) == KEY_BYTES and peer_id_of(key) == peer:
            return key
    raise ProtocolViolation(f"{peer[:60]!r} is not the peer id of an Ed25519 key (12D3Koo..., 52 characters)")


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the Ed25519 signature of `data` is valid. False for malformed keys and signatures."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _read_private_file(path: Path) -> bytes:
    """Reads a secret file if it is regular and only its owner has access. Raises FileNotFoundError, IdentityError."""
    try:
        # O_NONBLOCK: a named pipe in place of the file must not hang the start.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if path.is_symlink():
            raise IdentityError(f"{path} is a symbolic link, refused for a key", hint="Name the file itself.") from None
        raise _unusable(path, error) from error
    try:
        _check_private(os.fstat(descriptor), path)
        return os.read(descriptor, MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise _unusable(path, error) from error
    finally:
        os.close(descriptor)


def _check_private(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise IdentityError(f"{path} is not a regular file", hint="Name the key file itself with --identity.")
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        command = f"`chmod 600 {shlex.quote(str(path))}`"
        raise IdentityError(
            f"the identity key {path} is open to others (mode {mode:04o}): run {command}",
            hint=f"Run {command}; if others may have read it, create a new key instead.",
        )


def _parse_key(pem: bytes, path: Path) -> Ed25519PrivateKey:
    damaged = "Restore it from a copy, or move it away and create a new key (with a new peer id)."
    if len(pem) > MAX_KEY_FILE_BYTES:
        raise IdentityError(f"{path} is larger than {MAX_KEY_FILE_BYTES} bytes: not an identity key", hint=damaged)
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:
        raise IdentityError(f"the identity key {path} is encrypted", hint="Store it unencrypted, mode 600.") from None
    except (ValueError, UnsupportedAlgorithm):
        raise IdentityError(f"the identity key {path} is damaged: not a PKCS#8 PEM file", hint=damaged) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"the key in {path} is not an Ed25519 key", hint="Name another file with --identity.")
    return key


def _make_private_folders(folder: Path) -> None:
    """Creates missing folders with mode 0700. Does not change existing ones."""
    if folder.is_dir():
        return
    _make_private_folders(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder") from None


def _write_private_file(path: Path, data: bytes) -> None:
    """Writes a new file with mode 0600 atomically. Raises FileExistsError, also if `path` is a dangling symlink."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # the umask may have removed even the owner's rights
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.link(partial, path, follow_symlinks=False)
    finally:
        partial.unlink()


def _unusable(path: Path, error: OSError) -> IdentityError:
    return IdentityError(
        f"the identity key {path} cannot be used: {error.strerror or error}",
        hint="Check the path and its permissions, or name another file with --identity.",
    )
