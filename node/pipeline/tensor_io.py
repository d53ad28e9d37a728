"""Conversion between encoded tensors and tensors on the compute device."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from node.pipeline.runner import Job, Output
from protocol.codecs import Encoded, decode, encode
from protocol.codecs.blockwise import Expect, or_violates
from protocol.codecs.memory import ELEMENT_TYPES, buffer_for, to_device
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

_NOT_FINITE: Final = "the tensor has elements that are not finite"
_NO_TENSOR: Final = "the tensor is malformed, or it or a gradient computed from it is not finite"


def receive_buffers(device: torch.device) -> Callable[[int], memoryview]:
    """Returns a function that allocates a receive buffer of a given size, suited to copies to the device."""
    return partial(buffer_for, device=device)


def tensor_of(encoded: Encoded, device: torch.device) -> Tensor:
    """Decodes a tensor; an uncompressed one shares memory on the CPU. Raises ProtocolViolation if not finite."""
    tensor = _decoded(encoded, device, or_violates)
    if not are_finite(tensor):
        raise ProtocolViolation(_NOT_FINITE)
    return tensor


def _decoded(encoded: Encoded, device: torch.device, expect: Expect) -> Tensor:
    spec, kind = encoded.spec, ELEMENT_TYPES[encoded.spec.dtype]
    if spec.codec is Codec.NONE:
        return to_device(torch.frombuffer(encoded.data, dtype=kind).view(spec.shape), device)
    tensor = torch.empty(spec.shape, dtype=kind, device=device)
    decode(spec, encoded.data, tensor, expect)
    return tensor


def are_finite(tensor: Tensor) -> Tensor:
    """Tells whether all elements are finite, as a bool on the device. An overflowing sum counts as not finite."""
    return torch.isfinite(tensor.sum(dtype=torch.float32))


def relative_error(tensor: Tensor, encoded: Encoded) -> float:
    """Returns the relative error of an encoding in the Euclidean norm; 0 for a tensor of zeros."""
    exact, decoded = tensor.float(), tensor_of(encoded, tensor.device).float()
    lengths = torch.stack([torch.linalg.vector_norm(decoded - exact), torch.linalg.vector_norm(exact)])
    off, length = lengths.tolist()
    return off / length if length else 0.0


class Wire:
    """Decoder of a worker's received tensors and encoder of its results. Runs on the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.codec_s = 0.0
        """Seconds spent encoding and decoding, including concurrent GPU work."""
        self._expected: list[Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def start(self) -> None:
        self._expected.clear()

    def let_go(self) -> None:
        """Waits until the device has copied all received tensors, so that their receive buffers may be reused."""
        copied, self._copied = self._copied, None
        if copied is not None and not copied.query():  # type: ignore[no-untyped-call]
            copied.synchronize()

    def received(self, tensor: Encoded | None, *, before_use: bool = False) -> Tensor:
        """Decodes a received tensor. Checks that it is finite: now on a CPU or with `before_use`, else in `output`."""
        assert tensor is not None, "custody requests no work before its tensors arrive"
        begun = time.perf_counter()
        received = _decoded(tensor, self.device, self.expect)
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(self.device))
        self.expect(are_finite(received), _NOT_FINITE)
        if before_use and self._expected:
            self._check(bool(torch.stack(self._expected).all()), _NO_TENSOR)
        self.codec_s += time.perf_counter() - begun
        return received

    def expect(self, holds: Tensor, fault: str) -> None:
        """Makes the job fail with `fault` unless the device bool `holds` is true: now on the CPU, else in `output`."""
        if self.device.type == "cpu":
            self._check(bool(holds), fault)
        else:
            self._expected.append(holds)

    def output(self, tensor: Tensor, job: Job, loss: float | None = None) -> Output:
        """Encodes a job's result. Raises ProtocolViolation if a condition passed to `expect` does not hold."""
        begun = time.perf_counter()
        tensor = tensor.detach().contiguous()
        # Does not synchronise here: the encoding is copied later and waited for anyway.
        expected = torch.stack(self._expected).all().to("cpu", non_blocking=True) if self._expected else None
        encoded = encode(tensor, job.codec)
        if expected is not None:
            self._check(bool(expected), _NO_TENSOR)
        error = relative_error(tensor, encoded) if job.check_codec and encoded.spec.codec is job.codec else None
        self.codec_s += time.perf_counter() - begun
        return Output(encoded, loss, error=error)

    def _check(self, holds: bool, fault: str) -> None:
        self._expected.clear()
        if not holds:
            raise ProtocolViolation(fault)
