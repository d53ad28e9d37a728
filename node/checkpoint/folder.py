"""A run's checkpoint folder: writing a replica's snapshot into it, and finding the newest intact one."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from blake3 import blake3

from node.checkpoint.snapshot import (
    MAX_JSON_BYTES,
    FileRecord,
    Header,
    Owner,
    check_file,
    has_size,
    header_bytes,
    parse_header,
    read_state,
    state_pieces,
)
from node.checkpoint.state import ReplicaState
from node.observability.failpoints import crash_point
from protocol.manifest.manifest import MAX_MANIFEST_BYTES
from protocol.manifest.signing import SignedManifest, read_signed_manifest
from swarm.vocabulary.errors import (
    ConfigError,
    CorruptSnapshot,
    ManifestError,
    ResourceExhausted,
    SkipstoneError,
    StateError,
)
from swarm.vocabulary.types import ModuleId, PeerId, RunId


class Storage:
    """File operations on the disk. Each raises OSError on failure; tests replace them by ones that fail or die."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        with path.open("wb", buffering=0) as file:
            for piece in pieces:
                rest = piece
                while len(rest):  # a write may take less than it was given
                    rest = rest[file.write(rest) :]

    def sync(self, path: Path) -> None:
        """Makes a file's contents, or a folder's names, survive a power failure."""
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
    """Writes a file durably and atomically: whatever happens, the target is the old file or the new one."""
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
ROUTER_NAME: Final = "manifest.router"
KEPT: Final = 2
"""Whole snapshots of a replica that stay: the newest, and one to fall back to."""
_HEADER_NAME: Final = re.compile(r"state-(\d{1,15})\.json")
_OWN_NAME: Final = re.compile(r"state-\d{1,15}\.(json|safetensors)|\.state-(json|safetensors)\.part")
_DATA_BESIDE: Final = ".state-safetensors.part"
_HEADER_BESIDE: Final = ".state-json.part"
"""Always the same names: what a crash leaves behind is overwritten by the next attempt and cannot pile up."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The place of one run's checkpoint, and the run's identity that is written with it."""

    path: Path
    run: RunId
    manifest: bytes
    """The signed TOML file."""
    storage: Storage = field(default_factory=Storage)
    router: bytes = b""
    """Of a run whose manifest names one."""
    written: dict[Path, FileRecord] = field(default_factory=dict)
    """By this process, one a peer and number: hashed on the way to the disk, and not read again to be believed."""

    def of(self, peer: PeerId) -> Path:
        """The folder of a peer's snapshots."""
        return self.path / peer


@dataclass(frozen=True, slots=True)
class Problem:
    """A file of a snapshot that cannot be used, and why."""

    file: Path
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The newest intact snapshot, if there is one, and what was wrong with newer ones."""

    header: Header
    state: ReplicaState
    problems: tuple[Problem, ...] = ()


def save_state(folder: CheckpointFolder, peer: PeerId, module: ModuleId, state: ReplicaState) -> Header:
    """Writes a replica's snapshot and removes old ones; one writer a peer. Raises ResourceExhausted, StateError."""
    header = write_snapshot(folder, peer, module, state)
    remove_older(folder, peer)
    return header


def write_snapshot(folder: CheckpointFolder, peer: PeerId, module: ModuleId, state: ReplicaState) -> Header:
    """Writes a replica's snapshot, as `save_state`, without removing anything."""
    place = folder.of(peer)
    try:
        _write_manifest(folder, peer)
        folder.storage.make_folder(place)
        folder.storage.sync(folder.path)
        number = max(_numbers(folder.storage, place), default=0) + 1
        header = _write_pair(folder.storage, place, Owner(folder.run, peer, module), number, state)
    except OSError as error:
        message = f"the checkpoint of module {module} could not be written to {place}: {error.strerror or error}"
        if error.errno in _FULL:
            raise ResourceExhausted(message, hint="Free some space there; the snapshots before are kept.") from error
        raise StateError(
            message, hint="Check the folder and its permissions; the snapshots before are kept."
        ) from error
    folder.written[place / header.file.name] = header.file
    return header


def remove_older(folder: CheckpointFolder, peer: PeerId) -> None:
    """Removes all but the newest `KEPT` intact snapshots, and nothing while none is intact."""
    place, kept = folder.of(peer), set[str]()
    whole = 0
    for header in whole_snapshots(folder, peer, [], known=folder.written):
        kept |= {header.file.name, _header_name(header.number)}
        whole += 1
        if whole == KEPT:
            break
    if not whole:
        return
    # A json goes before its data: a snapshot ends as it began, with its json.
    rest = sorted(name for name in folder.storage.names(place) if _OWN_NAME.fullmatch(name) and name not in kept)
    for name in rest:
        folder.written.pop(place / name, None)
        try:
            folder.storage.remove(place / name)
        except OSError as error:
            log.warning("%s could not be removed: %s", place / name, error.strerror)


def load_newest(folder: CheckpointFolder, peer: PeerId, module: ModuleId | None = None) -> Loaded | None:
    """The peer's newest whole snapshot, of `module` or any; None if there never was one.

    Raises:
        CorruptSnapshot: All snapshots are damaged.
        StateError: See `check_run`.
    """
    check_run(folder)
    problems: list[Problem] = []
    for header in whole_snapshots(folder, peer, problems):
        if module in (None, header.owner.module):
            return Loaded(header, read_state(folder.of(peer), header), tuple(problems))
    if problems:
        raise CorruptSnapshot("no snapshot is whole: " + "; ".join(str(problem) for problem in problems))
    return None


def whole_snapshots(
    folder: CheckpointFolder, peer: PeerId, problems: list[Problem], known: Mapping[Path, FileRecord] | None = None
) -> Iterator[Header]:
    """A peer's intact snapshots, newest first. Adds others to `problems`; of `known` files only the size is checked."""
    for header in _headers(folder.storage, folder.of(peer), folder.run, problems):
        path = folder.of(peer) / header.file.name
        try:
            if known is None or known.get(path) != header.file or not has_size(path, header.file.size):
                check_file(folder.of(peer), header.file)
        except CorruptSnapshot as error:
            problems.append(Problem(folder.of(peer) / header.file.name, str(error)))
        else:
            yield header


def read_manifest(path: Path) -> SignedManifest:
    """The signed manifest of a checkpoint. Raises ConfigError if there is none, ManifestError if it is damaged."""
    try:
        with (path / MANIFEST_NAME).open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)  # one more than may be: the parser refuses it
    except OSError as error:
        raise ConfigError(f"{path} is not a checkpoint: {MANIFEST_NAME} cannot be read: {error.strerror}") from None
    return read_signed_manifest(text, None)


def check_run(folder: CheckpointFolder) -> None:
    """Checks that the folder is empty or this run's. Raises StateError."""
    if not (folder.path / MANIFEST_NAME).exists():
        return
    try:
        found = read_manifest(folder.path).run
    except ManifestError as error:
        raise StateError(
            f"{folder.path / MANIFEST_NAME} is damaged: {error}",
            hint="If the folder is this run's, remove that file: it is written anew.",
        ) from None
    if found != folder.run:
        raise StateError(f"{folder.path} holds the checkpoint of another run", hint="Name another or an empty folder.")


def _write_manifest(folder: CheckpointFolder, peer: PeerId) -> None:
    """Writes manifest and router once. Concurrent peers write the same bytes."""
    check_run(folder)
    for name, content in ((ROUTER_NAME, folder.router), (MANIFEST_NAME, folder.manifest)):
        target = folder.path / name
        if content and not target.exists():
            folder.storage.make_folder(folder.path)
            beside = target.with_name(f".{target.name}.{peer}.part")
            write_durably(folder.storage, target, beside, [memoryview(content)])


def _write_pair(storage: Storage, place: Path, owner: Owner, number: int, state: ReplicaState) -> Header:
    """The data first, the json last. What a failure leaves is cleared away, so that the next attempt has room."""
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
            if json.name not in storage.names(place):
                storage.remove(data)
        raise
    return header


def _headers(storage: Storage, place: Path, run: RunId, problems: list[Problem]) -> Iterator[Header]:
    """The jsons that are what was written here, newest first; each is read when it is asked for."""
    for number in sorted(_numbers(storage, place), reverse=True):
        file = place / _header_name(number)
        try:
            header = parse_header(_read_bounded(file))
            _check_belongs(header, run, PeerId(place.name), number)
        except SkipstoneError as error:
            problems.append(Problem(file, str(error)))
        else:
            yield header


def _check_belongs(header: Header, run: RunId, peer: PeerId, number: int) -> None:
    if header.owner.run != run:
        raise CorruptSnapshot(f"it is of another run, {header.owner.run}")
    if header.owner.peer != peer:
        raise CorruptSnapshot(f"it is of another peer, {header.owner.peer}")
    if header.number != number or header.file.name != f"state-{number}.safetensors":
        raise CorruptSnapshot(f"it is snapshot {header.number} under another number")


def _read_bounded(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CorruptSnapshot(f"it cannot be read: {error.strerror}") from None
    if len(text) > MAX_JSON_BYTES:
        raise CorruptSnapshot(f"it is longer than {MAX_JSON_BYTES} bytes")
    return text


def _numbers(storage: Storage, place: Path) -> list[int]:
    """Of the snapshots that have a json."""
    found = (_HEADER_NAME.fullmatch(name) for name in storage.names(place))
    return [int(match[1]) for match in found if match is not None and match[1] == str(int(match[1]))]


def _header_name(number: int) -> str:
    return f"state-{number}.json"
