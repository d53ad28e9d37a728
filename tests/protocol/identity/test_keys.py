"""The key file is safe from the first byte on, and the peer id is libp2p's."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hypothesis import given
from hypothesis import strategies as st

from protocol.identity.keys import Identity, peer_id_of, public_key_of, verify
from swarm.vocabulary.errors import IdentityError, ProtocolViolation
from swarm.vocabulary.types import PeerId, RunId

# From test vector 1 of libp2p's TLS specification.
SPECIFICATION_KEY = bytes.fromhex("7fda21856709c5ae12fd6e8450623f15f11955d384212b89f56e7e136d2e1728")
SPECIFICATION_PEER = "12D3KooWJRSrypvnpHgc6ZAgyCni4KcSmbV7uGRaMw5LgMKT18fq"


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(getattr(request, "param", 0))
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_peer_id_is_the_one_of_the_specification_and_of_hivemind() -> None:
    peer = peer_id_of(SPECIFICATION_KEY)
    assert peer == SPECIFICATION_PEER
    assert PeerID.from_base58(peer).to_bytes().hex() == "0024" + "08011220" + SPECIFICATION_KEY.hex()


@given(st.binary(min_size=32, max_size=32))
def test_peer_id_and_public_key_are_inverse(key: bytes) -> None:
    assert public_key_of(peer_id_of(key)) == key


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
def test_a_key_of_another_length_has_no_peer_id(key: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="32 bytes"):
        peer_id_of(key)


@pytest.mark.parametrize(
    "other",
    [
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        base58.b58encode(bytes.fromhex("002408021220") + bytes(32)).decode(),
        peer_id_of(bytes(32)) + " ",
        " " + peer_id_of(bytes(32)),
        peer_id_of(bytes(32))[:-1] + "é",
        "1" + peer_id_of(bytes(32))[:-1],
    ],
)
def test_other_ids_are_refused(other: str) -> None:
    with pytest.raises(ProtocolViolation):
        public_key_of(PeerId(other))


def test_signatures() -> None:
    identity, stranger = Identity.generate(), Identity.generate()
    signature = identity.sign(b"words")
    assert verify(identity.public_key, signature, b"words")
    assert not verify(identity.public_key, signature, b"other words")
    assert not verify(stranger.public_key, signature, b"words")
    assert not verify(identity.public_key, signature[:-1], b"words")
    assert not verify(identity.public_key, signature[:-1] + bytes([signature[-1] ^ 1]), b"words")
    assert not verify(identity.public_key[:-1], signature, b"words")


def test_each_run_has_a_key_of_its_own_that_comes_back(tmp_path: Path) -> None:
    Identity.create(tmp_path / "key")
    peers = [Identity.load(tmp_path / "key").for_run(RunId(run * 64)).peer for run in "aba"]
    assert peers[0] == peers[2] != peers[1] != Identity.load(tmp_path / "key").peer


@pytest.mark.usefixtures("umask")
def test_file_and_new_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "node.key"
    Identity.load_or_create(path)
    assert (mode_of(path), mode_of(path.parent), mode_of(path.parent.parent)) == (0o600, 0o700, 0o700)


@pytest.mark.usefixtures("umask")
def test_no_file_is_ever_open_to_others_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def looking(real: Callable[..., None]) -> Callable[..., None]:
        def look(descriptor: int, *mode: int) -> None:
            status = os.fstat(descriptor)
            seen.append((stat.S_IMODE(status.st_mode), status.st_size))
            real(descriptor, *mode)

        return look

    monkeypatch.setattr(os, "fchmod", looking(os.fchmod))
    monkeypatch.setattr(os, "fsync", looking(os.fsync))
    Identity.create(tmp_path / "node.key")
    assert [mode for mode, _ in seen] == [0o600, 0o600]
    assert seen[0][1] == 0


@pytest.mark.parametrize("umask", [0o777], indirect=True)
@pytest.mark.usefixtures("umask")
def test_a_strict_umask_leaves_the_owner_access(tmp_path: Path) -> None:
    Identity.create(tmp_path / "node.key")
    assert mode_of(tmp_path / "node.key") == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601, 0o660, 0o644, 0o777])
def test_a_key_open_to_others_is_refused_with_the_command_that_helps(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    Identity.create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError) as raised:
        Identity.load_or_create(path)
    assert f"chmod 600 {path}" in str(raised.value)
    assert f"{mode:04o}" in str(raised.value)
    path.chmod(0o400)
    Identity.load(path)


def test_create_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    kept = Identity.create(path)
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(path)
    assert Identity.load(path).peer == kept.peer
    assert [file.name for file in tmp_path.iterdir()] == ["node.key"]


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symbolic_link_is_neither_read_nor_written_through(tmp_path: Path, dangling: bool) -> None:
    real, link = tmp_path / "real.key", tmp_path / "node.key"
    if not dangling:
        Identity.create(real)
    link.symlink_to(real)
    with pytest.raises(IdentityError, match="symbolic link"):
        Identity.load(link)
    with pytest.raises(IdentityError, match="symbolic link"):
        Identity.load_or_create(link)
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(link)
    assert real.exists() is not dangling


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no identity key"):
        Identity.load(tmp_path / "none.key")
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load(pipe)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(IdentityError, match="cannot be used"):
        Identity.load_or_create(file / "node.key")


def _pem(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"\xff\x00 no key", "damaged"),
        (_pem(Ed25519PrivateKey.generate())[:-40], "damaged"),
        (_pem(Ed25519PrivateKey.generate()).replace(b"MC4CAQA", b"MC4CAQB"), "damaged"),
        (_pem(X25519PrivateKey.generate()), "not an Ed25519 key"),
        (
            Ed25519PrivateKey.generate().private_bytes(
                Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
            ),
            "encrypted",
        ),
        (_pem(Ed25519PrivateKey.generate()) + b"\n" * 5000, "larger than"),
    ],
    ids=["empty", "binary", "cut off", "changed", "another kind", "encrypted", "long"],
)
def test_what_is_no_ed25519_key_is_refused_and_kept(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=message):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_processes_that_start_together_agree_on_one_identity(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def start(_: int) -> PeerId:
        barrier.wait()
        return Identity.load_or_create(tmp_path / "new" / "node.key").peer

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(start, range(8)))) == 1


def test_repr_shows_no_key() -> None:
    identity = Identity.generate()
    assert repr(identity) == f"Identity({identity.peer})"
    assert not hasattr(identity, "__dict__")


CHECK = """
import protocol.dht.process, sys
heavy = {"torch", "numpy", "grpc", "pydantic", "hivemind.optim", "hivemind.moe"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_dhts_process_comes_without_torch() -> None:
    subprocess.run([sys.executable, "-c", CHECK], cwd=Path(__file__).parents[3], check=True)
