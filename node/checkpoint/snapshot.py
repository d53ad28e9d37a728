"""A snapshot's two files: tensors in safetensors, and a json that describes them.

The safetensors file is written here, so that gigabytes are hashed on the way and never copied
(https://github.com/huggingface/safetensors#format). The library reads it, after the hash was checked.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.checkpoint.state import AnchorState, Counters, DataState, ReplicaState, TensorsInParts
from node.data.documents import Place
from node.data.packing import Cursor
from node.model.device import bytes_of_tensor
from node.model.optimizer import InnerState
from node.model.optimizers.inner_rule import ParameterState
from node.model.packed import Floats
from swarm.vocabulary.errors import CorruptSnapshot, ProtocolViolation
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, RunId

FORMAT: Final = 1
MAX_JSON_BYTES: Final = 16 * 2**20
_NOT_INNER: Final = frozenset({"local", "anchor", "momentum"})
"""Groups of tensors; all others are the inner optimizer's."""
_PIECE: Final = 2**20
_ALIGNMENT: Final = 8
_HASH_CHARACTERS: Final = 64


@dataclass(frozen=True, slots=True)
class Owner:
    """The replica that a snapshot is of."""

    run: RunId
    peer: PeerId
    module: ModuleId


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The record of a file that belongs to a snapshot: its length and hash."""

    name: str
    size: int
    blake3: str
    """64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Header:
    """The content of a snapshot's json: everything but the tensors."""

    owner: Owner
    number: int
    steps: int
    adam_steps: dict[str, int]
    """Of each parameter that the inner optimizer has a state of, whichever it is."""
    counters: Counters
    anchor: AnchorVersion | None
    data: DataState | None
    file: FileRecord


# ---- tensors ---------------------------------------------------------------------------------------------------------


def own_tensors(local: Mapping[str, Floats], inner: InnerState) -> dict[str, Floats]:
    """A replica's own tensors as `local/NAME`, and the inner optimizer's such as `exp_avg/NAME`."""
    named: dict[str, Floats] = {f"local/{name}": tensor for name, tensor in local.items()}
    for name, own in inner.parameters.items():
        named |= {f"{slot}/{name}": tensor for slot, tensor in own.tensors.items()}
        named |= {f"{slot}/{name}": packed for slot, packed in own.packed.items()}
    return named


def state_pieces(state: ReplicaState) -> Iterator[memoryview]:
    """The bytes of a safetensors file with all tensors as float32: those still to be copied come first."""
    own = own_tensors(state.local, state.inner)
    copying = () if state.copying is None else state.copying.names
    rest = {name: tensor for name, tensor in own.items() if name not in copying}
    groups: list[tuple[str, Mapping[str, Floats]]] = [("", rest)]
    if state.anchor is not None:
        groups += [("anchor/", state.anchor.parameters), ("momentum/", state.anchor.momentum or {})]
    shapes = {name: tuple(own[name].shape) for name in copying}
    for prefix, tensors in groups:
        shapes |= {prefix + name: _shape_of(tensors, name) for name in tensors}
    yield _table_of_tensors(shapes)
    if state.copying is not None:
        yield from state.copying.pieces()
    for _, tensors in groups:
        for name in tensors:
            for part in _parts_of(tensors, name):
                data = bytes_of_tensor(part.to(torch.float32))
                yield from (data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE))


def _shape_of(tensors: Mapping[str, Floats], name: str) -> tuple[int, ...]:
    return tensors.shape_of(name) if isinstance(tensors, TensorsInParts) else tuple(tensors[name].shape)


def _parts_of(tensors: Mapping[str, Floats], name: str) -> Iterator[Tensor]:
    if isinstance(tensors, TensorsInParts):
        return tensors.parts_of(name)
    tensor = tensors[name]
    return iter((tensor,)) if isinstance(tensor, Tensor) else map(tensor.read, tensor.parts())


def _table_of_tensors(shapes: Mapping[str, tuple[int, ...]]) -> memoryview:
    """The head of a safetensors file with float32 tensors in this order."""
    table: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return memoryview(struct.pack("<Q", len(text)) + text)


def check_file(folder: Path, record: FileRecord) -> None:
    """Reads the whole file and compares it with the record. Raises CorruptSnapshot."""
    path, hasher, size = folder / record.name, blake3(), 0
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                size += len(piece)
                hasher.update(piece)
    except OSError as error:
        raise CorruptSnapshot(f"{path} cannot be read: {error.strerror}") from None
    if size != record.size:
        raise CorruptSnapshot(f"{path} has {size} bytes, {record.size} were written")
    if hasher.hexdigest() != record.blake3:
        raise CorruptSnapshot(f"{path} is not what was written: its BLAKE3 differs from the one noted with it")


def has_size(path: Path, size: int) -> bool:
    """Whether there is a file of this size."""
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def read_tensors(path: Path, group: str) -> dict[str, Tensor]:
    """The tensors of one group by parameter name, from a checked file. Raises CorruptSnapshot."""
    prefix = f"{group}/"
    with _opened(path) as opened:
        names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118 - no mapping
        # Copies: the library's tensors are windows into the file, and the file will be removed one day.
        return {name.removeprefix(prefix): opened.get_tensor(name).clone() for name in names}


def _groups(path: Path) -> set[str]:
    with _opened(path) as opened:
        return {name.partition("/")[0] for name in opened.keys()}  # noqa: SIM118 - no mapping


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CorruptSnapshot(f"{path} cannot be read: {error}") from error


def read_state(folder: Path, header: Header) -> ReplicaState:
    """The state that a header describes, from a checked file. Raises CorruptSnapshot."""
    path = folder / header.file.name
    anchor = None
    if header.anchor is not None:
        anchor = AnchorState(header.anchor, read_tensors(path, "anchor"), read_tensors(path, "momentum") or None)
    of_inner: dict[str, dict[str, Tensor]] = {name: {} for name in header.adam_steps}
    for slot in _groups(path) - _NOT_INNER:
        for name, tensor in read_tensors(path, slot).items():
            of_inner.setdefault(name, {})[slot] = tensor
    parameters = {name: ParameterState(header.adam_steps.get(name, 0), own) for name, own in of_inner.items()}
    inner = InnerState(header.steps, parameters)
    return ReplicaState(read_tensors(path, "local"), inner, header.counters, anchor, header.data)


# ---- the json --------------------------------------------------------------------------------------------------------


def header_bytes(header: Header) -> bytes:
    """Serialises the json, with a BLAKE3 over all the rest of it."""
    table = _table(header)
    return _canonical(table | {"blake3": blake3(_canonical(table)).hexdigest()})


def parse_header(text: bytes) -> Header:
    """Parses what `header_bytes` wrote. Raises CorruptSnapshot: it is anything else, down to a byte."""
    try:
        table = json.loads(text)
        stated = table.pop("blake3")
        if stated != blake3(_canonical(table)).hexdigest() or text != _canonical(table | {"blake3": stated}):
            raise CorruptSnapshot("its own BLAKE3 differs from the one noted in it")
        if table["format"] != FORMAT:
            raise CorruptSnapshot(f"format {table['format']} is not the {FORMAT} that this version reads")
        return _header(table)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ProtocolViolation) as error:
        raise CorruptSnapshot(f"it is not the json of a snapshot: {type(error).__name__}: {error}") from None


def _table(header: Header) -> dict[str, Any]:
    table = {"format": FORMAT, **dataclasses.asdict(header)}
    if header.anchor is not None:
        table["anchor"]["digest"] = header.anchor.digest.hex()
    return table


def _header(table: dict[str, Any]) -> Header:
    owner, anchor, data = table["owner"], table["anchor"], table["data"]
    if anchor is not None:
        anchor = AnchorVersion(**(anchor | {"digest": bytes.fromhex(anchor["digest"])}))
    if data is not None:
        cursor = data["cursor"]
        cursor.pop("routed_by", None)  # of versions whose router went on learning
        data = DataState(**(data | {"cursor": Cursor(**(cursor | {"block": Place(**cursor["block"])}))}))
    return Header(
        Owner(RunId(owner["run"]), PeerId(owner["peer"]), ModuleId(**owner["module"])),
        int(table["number"]),
        int(table["steps"]),
        dict(table["adam_steps"]),
        Counters(**table["counters"]),
        anchor,
        data,
        _file_record(table["file"]),
    )


def _file_record(table: dict[str, Any]) -> FileRecord:
    record = FileRecord(**table)
    if Path(record.name).name != record.name or len(record.blake3) != _HASH_CHARACTERS:
        raise CorruptSnapshot(f"it names a file that cannot be a snapshot's: {record.name!r}")
    return record


def _canonical(table: dict[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
