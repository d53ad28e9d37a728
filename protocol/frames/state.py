"""The frames of catching up: asking for chunks of a module's state, sending them, refusing them
(`swarm.vocabulary.averaging_messages`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from protocol.frames.averaging import MAX_CHUNKS
from protocol.frames.fields import (
    TensorFrame,
    checked_digest,
    read_enum,
    read_header,
    read_module,
    wire_header,
    wire_module,
    wire_number,
)
from protocol.generated import link_pb2 as wire
from protocol.interfaces.tensor_spec import DType
from swarm.vocabulary.averaging_messages import StateChunk, StateControl, StateRefusal, StateRefused, StateRequest
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

MAX_REQUESTED_CHUNKS: Final = 64

_LOSSLESS: Final = frozenset({Codec.NONE, Codec.PLANES})


def encode_state_chunk(message: StateChunk, frame: TensorFrame) -> wire.Frame:
    """The frame of link.proto for a chunk's header."""
    chunk = wire.StateChunk(
        module=wire_module(message.module),
        digest=message.digest,
        chunk=message.chunk,
        tensor=wire_header(frame),
    )
    return wire.Frame(state_chunk=chunk)


def encode_state(message: StateControl) -> wire.Frame:
    """The frame of link.proto for a request or a refusal."""
    module, digest, chunks = wire_module(message.module), message.digest, message.chunks
    match message:
        case StateRequest():
            return wire.Frame(state_request=wire.StateRequest(module=module, digest=digest, chunks=chunks))
        case StateRefused():
            reason = wire_number(message.reason)
            return wire.Frame(
                state_refused=wire.StateRefused(module=module, digest=digest, chunks=chunks, reason=reason)
            )


def read_state_request(request: wire.StateRequest) -> StateRequest:
    return StateRequest(read_module(request.module), checked_digest(request.digest), _read_numbers(request.chunks))


def read_state_refused(refused: wire.StateRefused) -> StateRefused:
    return StateRefused(
        read_module(refused.module),
        checked_digest(refused.digest),
        _read_numbers(refused.chunks),
        read_enum(StateRefusal, refused.reason, "reason to refuse state"),
    )


def read_state_chunk(chunk: wire.StateChunk) -> TensorFrame:
    """Whether it was asked for, and how long it must be, is for the asker to check."""
    if chunk.chunk >= MAX_CHUNKS:
        raise ProtocolViolation(f"state: chunk {chunk.chunk} is not below {MAX_CHUNKS}")
    message = StateChunk(read_module(chunk.module), checked_digest(chunk.digest), chunk.chunk)
    frame = read_header(message, chunk.tensor)
    tensor = frame.tensor
    if len(tensor.shape) != 1 or tensor.dtype is not DType.FLOAT32 or tensor.codec not in _LOSSLESS:
        raise ProtocolViolation(
            f"state: a chunk is a float32 vector without loss, not {tensor.codec.name} {tensor.dtype.name} "
            f"{tensor.shape}"
        )
    return frame


def _read_numbers(chunks: Sequence[int]) -> tuple[int, ...]:
    if not 1 <= len(chunks) <= MAX_REQUESTED_CHUNKS:
        raise ProtocolViolation(f"state: {len(chunks)} chunks are named; 1 to {MAX_REQUESTED_CHUNKS} are allowed")
    if len(set(chunks)) < len(chunks) or max(chunks) >= MAX_CHUNKS:
        raise ProtocolViolation(f"state: a chunk is named twice, or is not below {MAX_CHUNKS}")
    return tuple(chunks)
