"""The checkpoint folder of a run: writes snapshots, finds the newest intact one, and gathers a whole model."""

import dataclasses
import errno
import json
import logging
import math
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.checkpoint.state import AnchorState, Counters, DataState, ReplicaState, TensorsInParts
from node.model.optimizer import InnerState
from node.model.optimizers.inner_rule import ParameterState
from node.model.optimizers.packed import Floats
from node.observability.failpoints import crash_point
from node.observability.typed_json import from_json
from protocol.codecs.memory import octets_of_tensor
from protocol.manifest.manifest import MAX_MANIFEST_BYTES
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.vocabulary.errors import (
    ConfigError,
    CorruptSnapshot,
    ManifestError,
    ProtocolViolation,
    ResourceExhausted,
    SkipstoneError,
    StateError,
)
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, RunId

FORMAT: Final = 1
MAX_JSON_BYTES: Final = 16 * 2**20
_PIECE: Final = 2**20


@dataclass(frozen=True, slots=True)
class Owner:
    run: RunId
    peer: PeerId
    module: ModuleId


@dataclass(frozen=True, slots=True)
class FileRecord:
    name: str
    size: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Header:
    """Content of a snapshot's json: everything except the tensors."""

    owner: Owner
    number: int
    steps: int
    adam_steps: dict[str, int]  # Steps of each parameter that has optimizer state
    counters: Counters
    anchor: AnchorVersion | None
    data: DataState | None
    file: FileRecord


def own_tensors(local: Mapping[str, Floats], inner: InnerState) -> dict[str, Floats]:
    """Names a replica's parameters `local/NAME` and its optimizer state `SLOT/NAME`, such as `exp_avg/NAME`."""
    named: dict[str, Floats] = {f"local/{name}": tensor for name, tensor in local.items()}
    for name, own in inner.parameters.items():
        named |= {f"{slot}/{name}": tensor for slot, tensor in own.tensors.items()}
        named |= {f"{slot}/{name}": packed for slot, packed in own.packed.items()}
    return named


def state_pieces(state: ReplicaState) -> Iterator[memoryview]:
    """Yields the bytes of a safetensors file with all tensors of a replica, float32, unfinished copies first."""
    own = own_tensors(state.local, state.inner)
    copying = () if state.copying is None else state.copying.names
    rest = {name: tensor for name, tensor in own.items() if name not in copying}
    groups: list[tuple[str, Mapping[str, Floats]]] = [("", rest)]
    if state.anchor is not None:
        # The anchor is immutable, so it needs no copy.
        groups += [("anchor/", state.anchor.parameters), ("momentum/", state.anchor.momentum or {})]
    shapes = {name: tuple(own[name].shape) for name in copying}
    for prefix, tensors in groups:
        parts = tensors if isinstance(tensors, TensorsInParts) else None
        shapes |= {prefix + name: parts.shape_of(name) if parts else tuple(tensors[name].shape) for name in tensors}
    yield _table_of_tensors(shapes)
    if state.copying is not None:
        yield from state.copying.pieces()
    for _, tensors in groups:
        for name in tensors:
            for part in _parts_of(tensors, name):
                data = octets_of_tensor(part.detach().to("cpu", torch.float32).contiguous())
                yield from (data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE))


def _parts_of(tensors: Mapping[str, Floats], name: str) -> Iterator[Tensor]:
    if isinstance(tensors, TensorsInParts):
        return tensors.parts_of(name)
    tensor = tensors[name]
    return iter((tensor,)) if isinstance(tensor, Tensor) else map(tensor.read, tensor.parts())


def _table_of_tensors(shapes: Mapping[str, tuple[int, ...]]) -> memoryview:
    """Returns the header of a safetensors file with float32 tensors in this order."""
    # We write the format ourselves to hash gigabytes while writing (https://github.com/huggingface/safetensors#format).
    table: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return memoryview(struct.pack("<Q", len(text)) + text)


def check_file(folder: Path, record: FileRecord) -> None:
    """Compares a file's size and BLAKE3 with its record. Raises CorruptSnapshot if they differ."""
    path, hasher, size = folder / record.name, blake3(), 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                size += len(piece)
                hasher.update(piece)
    except OSError as error:
        raise CorruptSnapshot(f"{path} cannot be read: {error.strerror}") from None
    if size != record.size:
        raise CorruptSnapshot(f"{path} has {size} bytes instead of {record.size}")
    if hasher.hexdigest() != record.blake3:
        raise CorruptSnapshot(f"{path} is damaged: its BLAKE3 differs from the recorded one")


def read_tensors(path: Path, group: str) -> dict[str, Tensor]:
    """Returns the tensors named `group/NAME` in a verified file, by NAME. Raises CorruptSnapshot."""
    prefix = f"{group}/"
    with opened_tensors(path) as opened:
        names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 - no mapping
        # Copy, because the library's tensors are views of the file, which is removed later.
        return {name.removeprefix(prefix): opened.get_tensor(name).clone() for name in names}


MAX_HEADER_BYTES: Final = 2**24  # Longest accepted header of a safetensors file


def check_header_size(file: BinaryIO) -> None:
    """Raises SafetensorError if a safetensors file, opened at its start, has a header of more than MAX_HEADER_BYTES."""
    header_bytes = int.from_bytes(file.read(8), "little")  # safetensors accepts 100 MB, which takes gigabytes to parse
    if header_bytes > MAX_HEADER_BYTES:
        raise SafetensorError(f"the header has {header_bytes} bytes, more than {MAX_HEADER_BYTES}")


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises StateError if it is missing, CorruptSnapshot if it is damaged."""
    try:
        with path.open("rb") as file:
            check_header_size(file)
        with safe_open(path, framework="pt") as opened:
            yield opened
    except FileNotFoundError:
        raise StateError(f"{path} does not exist") from None
    except (OSError, SafetensorError) as error:
        raise CorruptSnapshot(f"{path} cannot be read: {error}") from error


def read_state(folder: Path, header: Header) -> ReplicaState:
    """Reads the replica state that a header describes, from a verified file. Raises CorruptSnapshot."""
    path = folder / header.file.name
    anchor = None
    if header.anchor is not None:
        anchor = AnchorState(header.anchor, read_tensors(path, "anchor"), read_tensors(path, "momentum") or None)
    of_inner: dict[str, dict[str, Tensor]] = {name: {} for name in header.adam_steps}
    with opened_tensors(path) as opened:
        slots = {name.partition("/")[0] for name in opened.keys()}  # noqa: SIM118 - no mapping
    for slot in slots - {"local", "anchor", "momentum"}:
        for name, tensor in read_tensors(path, slot).items():
            of_inner.setdefault(name, {})[slot] = tensor
    parameters = {name: ParameterState(header.adam_steps.get(name, 0), own) for name, own in of_inner.items()}
    inner = InnerState(header.steps, parameters)
    return ReplicaState(read_tensors(path, "local"), inner, header.counters, anchor, header.data)


def header_bytes(header: Header) -> bytes:
    """Serialises a header as JSON, with a BLAKE3 of all its other keys."""
    table: dict[str, Any] = {"format": FORMAT, **dataclasses.asdict(header)}
    if header.anchor is not None:
        table["anchor"]["digest"] = header.anchor.digest.hex()
    return _canonical(table | {"blake3": blake3(_canonical(table)).hexdigest()})


def parse_header(text: bytes) -> Header:
    """Parses the output of `header_bytes`. Raises CorruptSnapshot if a single byte differs."""
    try:
        table = json.loads(text)
        stated = table.pop("blake3")
        if stated != blake3(_canonical(table)).hexdigest() or text != _canonical(table | {"blake3": stated}):
            raise CorruptSnapshot("its BLAKE3 differs from the recorded one")
        if table["format"] != FORMAT:
            raise CorruptSnapshot(f"this version reads format {FORMAT}, not {table['format']}")
        return _header(table)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ProtocolViolation) as error:
        raise CorruptSnapshot(f"it is not a snapshot's json: {type(error).__name__}: {error}") from None


def _header(table: dict[str, Any]) -> Header:
    header = from_json(Header, table, "the header")
    record, anchor = header.file, header.anchor
    if Path(record.name).name != record.name or len(record.blake3) != 64:
        raise CorruptSnapshot(f"it names an invalid file: {record.name!r}")
    if anchor is None:
        return header
    return dataclasses.replace(header, anchor=dataclasses.replace(anchor, digest=bytes.fromhex(anchor.digest.decode())))


def _canonical(table: dict[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


class Storage:
    """File operations on the disk, which raise OSError. Tests replace them to inject failures."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                rest = piece
                while len(rest):  # a write may be partial
                    rest = rest[file.write(rest) :]

    def sync(self, path: Path) -> None:
        """Flushes a file's contents or a folder's names to disk, so that they survive a power failure."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def names(self, folder: Path) -> tuple[str, ...]:
        try:
            return tuple(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return ()


def write_durably(storage: Storage, target: Path, beside: Path, pieces: Iterable[memoryview]) -> None:
    """Replaces a file durably and atomically: after any failure, the target is the old or the new file."""
    crash_point("before write")
    storage.write(beside, pieces)
    crash_point("before sync")
    storage.sync(beside)
    crash_point("before rename")
    storage.rename(beside, target)
    crash_point("after rename")
    storage.sync(target.parent)


log = logging.getLogger(__name__)

MANIFEST_NAME: Final = "manifest.toml"
NOT_A_CHECKPOINT: Final = "Name a folder that --checkpoint-dir has written, or one from `skipstone export`."
KEPT: Final = 2
LEFT_KEPT_S: Final = 3600.0
_HEADER_NAME: Final = re.compile(r"state-(\d{1,15})\.json")
_OWN_NAME: Final = re.compile(r"state-\d{1,15}\.(json|safetensors)|\.state-(json|safetensors)\.part")
_DATA_BESIDE: Final = ".state-safetensors.part"
_HEADER_BESIDE: Final = ".state-json.part"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A run's checkpoint folder: path, run id, manifest, router, and the files that this process wrote."""

    path: Path
    run: RunId
    manifest: bytes
    storage: Storage = field(default_factory=Storage)
    router: bytes = b""
    written: dict[Path, FileRecord] = field(default_factory=dict)  # By this process: hashes are known

    def of(self, peer: PeerId) -> Path:
        return self.path / peer


@dataclass(frozen=True, slots=True)
class Loaded:
    """A peer's newest intact snapshot, and the damaged files of newer snapshots."""

    header: Header
    state: ReplicaState
    problems: tuple[str, ...] = ()


def save_state(folder: CheckpointFolder, peer: PeerId, module: ModuleId, state: ReplicaState) -> Header:
    """Writes a snapshot and removes old ones. Only one writer per peer. Raises ResourceExhausted, StateError."""
    header = write_snapshot(folder, peer, module, state)
    remove_older(folder, peer)
    return header


def write_snapshot(folder: CheckpointFolder, peer: PeerId, module: ModuleId, state: ReplicaState) -> Header:
    """Writes a replica's snapshot without removing older snapshots. Raises the errors of `save_state`."""
    place = folder.of(peer)
    try:
        _write_manifest(folder, peer)
        folder.storage.make_folder(place)
        folder.storage.sync(folder.path)  # makes the new folder's name durable
        number = max(_numbers(folder.storage, place), default=0) + 1
        header = _write_pair(folder.storage, place, Owner(folder.run, peer, module), number, state)
    except OSError as error:
        message = f"cannot write the checkpoint of module {module} to {place}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceExhausted(message, hint="Free some space there. Earlier snapshots are intact.") from error
        raise StateError(message, hint="Check the folder and its permissions. Earlier snapshots are intact.") from error
    folder.written[place / header.file.name] = header.file
    return header


def remove_older(folder: CheckpointFolder, peer: PeerId) -> None:
    """Removes all snapshots of a peer except the newest KEPT intact ones. If none is intact, removes nothing."""
    place = folder.of(peer)
    newest = islice(whole_snapshots(folder, peer, [], known=folder.written), KEPT)
    kept = {name for header in newest for name in (header.file.name, _header_name(header.number))}
    if not kept:
        return
    # Sorting removes each json before its tensors, so that no snapshot remains without tensors.
    rest = sorted(name for name in folder.storage.names(place) if _OWN_NAME.fullmatch(name) and name not in kept)
    for name in rest:
        folder.written.pop(place / name, None)
        try:
            folder.storage.remove(place / name)
        except OSError as error:
            log.warning("cannot remove %s: %s", place / name, error.strerror)


def keep_left(place: Path) -> bool:
    """Keeps a peer's newest snapshot in the subfolder `left` for LEFT_KEPT_S. Returns whether one is kept."""
    left, number = place / "left", max(_numbers(Storage(), place), default=0)
    try:
        there = os.listdir(left) if left.is_dir() else []
        if there and time.time() - left.stat().st_mtime < LEFT_KEPT_S:  # the first one: a liar may repeat its lie
            return True
        for name in there:
            (left / name).unlink()
        if not number:
            return False
        left.mkdir(exist_ok=True)
        for name in (f"state-{number}.safetensors", _header_name(number)):
            os.link(place / name, left / name)
    except OSError as error:
        log.warning("cannot keep the snapshot of the anchor that was left in %s: %s", left, error.strerror)
        return False
    return True


def load_newest(folder: CheckpointFolder, peer: PeerId, module: ModuleId | None = None) -> Loaded | None:
    """Loads a peer's newest intact snapshot (of `module`, if given), or None. Raises CorruptSnapshot, StateError."""
    check_run(folder)
    problems: list[str] = []
    for header in whole_snapshots(folder, peer, problems):
        if module in (None, header.owner.module):
            return Loaded(header, read_state(folder.of(peer), header), tuple(problems))
    if problems:
        raise CorruptSnapshot("no snapshot is intact: " + "; ".join(problems))
    return None


def whole_snapshots(
    folder: CheckpointFolder, peer: PeerId, problems: list[str], known: Mapping[Path, FileRecord] | None = None
) -> Iterator[Header]:
    """Yields a peer's intact snapshots, newest first; appends damage to `problems`. Does not hash `known` files."""
    for header in _headers(folder.storage, folder.of(peer), folder.run, problems):
        path = folder.of(peer) / header.file.name
        try:
            is_known = (known or {}).get(path) == header.file  # hashing takes long, so trust our own files
            if not is_known or not path.is_file() or path.stat().st_size != header.file.size:
                check_file(folder.of(peer), header.file)
        except CorruptSnapshot as error:
            problems.append(f"{path}: {error}")
        else:
            yield header


def read_manifest(path: Path) -> SignedManifest:
    """Reads the signed manifest of a checkpoint. Raises ConfigError if it is missing, ManifestError if damaged."""
    try:
        with (path / MANIFEST_NAME).open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)  # if it is too long, the parser rejects it
    except OSError as error:
        raise ConfigError(
            f"{path} is not a checkpoint: {MANIFEST_NAME} cannot be read: {error.strerror}", hint=NOT_A_CHECKPOINT
        ) from None
    return read_signed_manifest(text, None)


def check_run(folder: CheckpointFolder) -> None:
    """Raises StateError unless the folder is empty or belongs to this run."""
    if not (folder.path / MANIFEST_NAME).exists():
        return
    try:
        found = read_manifest(folder.path).run
    except ManifestError as error:
        raise StateError(
            f"{folder.path / MANIFEST_NAME} is damaged: {error}",
            hint="If the folder belongs to this run, remove the file. The node rewrites it.",
        ) from None
    if found != folder.run:
        raise StateError(f"{folder.path} has the checkpoint of another run", hint="Choose another folder.")


def _write_manifest(folder: CheckpointFolder, peer: PeerId) -> None:
    """Writes the run's manifest and router if they are missing. Concurrent peers write the same bytes."""
    check_run(folder)
    for name, content in (("manifest.router", folder.router), (MANIFEST_NAME, folder.manifest)):
        target = folder.path / name
        if content and not target.exists():
            folder.storage.make_folder(folder.path)
            beside = target.with_name(f".{target.name}.{peer}.part")
            write_durably(folder.storage, target, beside, [memoryview(content)])


def _write_pair(storage: Storage, place: Path, owner: Owner, number: int, state: ReplicaState) -> Header:
    """Writes a snapshot: tensors, then json. After a failure, removes incomplete files to free their space."""
    data, json = place / f"state-{number}.safetensors", place / _header_name(number)
    hasher, size = blake3(), 0

    def noted() -> Iterator[memoryview]:
        nonlocal size
        for piece in state_pieces(state):
            hasher.update(piece)
            size += len(piece)
            yield piece

    try:
        write_durably(storage, data, place / _DATA_BESIDE, noted())
        inner, version = state.inner, None if state.anchor is None else state.anchor.version
        record = FileRecord(data.name, size, hasher.hexdigest())
        moved = {name: own.steps for name, own in inner.parameters.items()}
        header = Header(owner, number, inner.steps, moved, state.counters, version, state.data, record)
        write_durably(storage, json, place / _HEADER_BESIDE, [memoryview(header_bytes(header))])
    except (OSError, StateError):
        with suppress(OSError):
            storage.remove(place / _DATA_BESIDE)
            storage.remove(place / _HEADER_BESIDE)
            if json.name not in storage.names(place):  # with a json, the snapshot is complete and keeps its tensors
                storage.remove(data)
        raise
    return header


def _headers(storage: Storage, place: Path, run: RunId, problems: list[str]) -> Iterator[Header]:
    """Yields a peer's valid snapshot headers, newest first, and appends invalid ones to `problems`."""
    for number in sorted(_numbers(storage, place), reverse=True):
        file = place / _header_name(number)
        try:
            with file.open("rb") as opened:
                text = opened.read(MAX_JSON_BYTES + 1)
            if len(text) > MAX_JSON_BYTES:
                raise CorruptSnapshot(f"it is longer than {MAX_JSON_BYTES} bytes")
            header = parse_header(text)
            if header.owner.run != run:
                raise CorruptSnapshot(f"it belongs to another run, {header.owner.run}")
            if header.owner.peer != place.name:
                raise CorruptSnapshot(f"it belongs to another peer, {header.owner.peer}")
            if header.number != number or header.file.name != f"state-{number}.safetensors":
                raise CorruptSnapshot(f"it is snapshot {header.number} under a different name")
        except OSError as error:
            problems.append(f"{file}: it cannot be read: {error.strerror}")
        except SkipstoneError as error:
            problems.append(f"{file}: {error}")
        else:
            yield header


def _numbers(storage: Storage, place: Path) -> list[int]:
    """Returns the numbers of the snapshots in this folder that have a json."""
    found = (_HEADER_NAME.fullmatch(name) for name in storage.names(place))
    # Leading zeros would give two names for one number.
    return [int(match[1]) for match in found if match is not None and match[1] == str(int(match[1]))]


def _header_name(number: int) -> str:
    return f"state-{number}.json"


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A whole model, gathered from all peers' snapshots in a checkpoint."""

    path: Path
    signed: SignedManifest
    replicas: Mapping[ModuleId, list[Header]]  # Each module's snapshots on its newest anchor
    problems: tuple[str, ...]  # Damaged files that were ignored

    def module(self, module: ModuleId) -> dict[str, Tensor]:
        """Averages a module's parameters by tokens in float64, with one replica in memory at a time."""
        headers = self.replicas[module]
        files = [self.path / header.owner.peer / header.file.name for header in headers]
        if len(headers) == 1:
            return read_tensors(files[0], "local")
        weights = [header.counters.tokens_since_anchor for header in headers]
        if not any(weights):  # without training since the anchor, all replicas count equally
            weights = [1] * len(headers)
        total: dict[str, Tensor] = {}
        for file, weight in zip(files, weights, strict=True):
            for name, tensor in read_tensors(file, "local").items():
                part = tensor.to(torch.float64) * (weight / sum(weights))
                total[name] = total[name] + part if name in total else part
        return {name: tensor.to(torch.float32) for name, tensor in total.items()}


def gather_modules(path: Path) -> Gathered:
    """Finds each module's replicas on its newest anchor. Raises ConfigError, ManifestError, StateError."""
    signed = read_manifest(path)
    folder, problems, newest = CheckpointFolder(path, signed.run, signed.text), list[str](), list[Header]()
    for peer in sorted(PeerId(entry.name) for entry in os.scandir(path) if entry.is_dir()):
        of_peer: dict[ModuleId, Header] = {}  # a peer that moved to another module has snapshots of both
        for header in whole_snapshots(folder, peer, problems):
            of_peer.setdefault(header.owner.module, header)
        newest += of_peer.values()
    replicas: dict[ModuleId, list[Header]] = {}
    for module in signed.manifest.modules():
        of_module = [header for header in newest if header.owner.module == module]
        if not of_module and problems:
            raise CorruptSnapshot(f"{path}: no snapshot of module {module} is intact: {'; '.join(problems)}")
        if not of_module:
            raise StateError(
                f"{path} has no snapshot of module {module}", hint="Collect peers' folders, at least one per module."
            )
        anchor = max(of_module, key=_progress).anchor  # replicas may be a round apart; average only the newest
        replicas[module] = [header for header in of_module if header.anchor == anchor]
    return Gathered(path, signed, replicas, tuple(problems))


def _progress(header: Header) -> tuple[int, int, int, bytes]:
    """Returns a sort key for snapshots: round, steps, tokens and digest of the anchor."""
    anchor = header.anchor  # if two anchors are equally far, the digest decides the same way everywhere
    return (-1, 0, 0, b"") if anchor is None else (anchor.round, anchor.steps, anchor.tokens, anchor.digest)
