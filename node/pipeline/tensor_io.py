"""Conversion between encoded tensors and tensors on the compute device."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from statistics import median_low
from typing import Final

import torch
from torch import Tensor

from node.pipeline.runner import Job, Output
from protocol.codecs import Encoded, decode, encode
from protocol.codecs.blockwise import Expect, or_violates
from protocol.codecs.memory import ELEMENT_TYPES, buffer_for, to_device
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec, MicrobatchId, PeerId

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


GRADIENT_AT_MOST: Final = 3.0  # Largest norm of a microbatch's gradient, in usual norms. A longer one is scaled down.
ALONE_AT_MOST: Final = 100.0  # With one data node, whose norms change by more early, or with few norms
FEW_NORMS: Final = 16
NORMS_KEPT: Final = 32  # Norms of each data node from which its median is computed
MOST_DATA_NODES: Final = 64
FACTORS_KEPT: Final = 4096


class GradientClip:
    """Limits each microbatch's gradient, so that no data node owns an inner step.

    The usual norm is the lower median of the data nodes' medians: many microbatches of one count like few.
    """

    def __init__(self) -> None:
        self._norms: OrderedDict[PeerId, deque[float]] = OrderedDict()
        self._medians: dict[PeerId, float] = {}
        self._factors: OrderedDict[MicrobatchId, Tensor | None] = OrderedDict()
        self._unread: tuple[PeerId, Tensor] | None = None

    def clipped(self, microbatch: MicrobatchId, gradient: Tensor, labels: int = 0) -> Tensor:
        """Returns the gradient [rows, tokens, hidden], scaled down if it is too long; again by the same factor.

        `labels`: predicted tokens; 0: all.
        """
        if microbatch not in self._factors:
            # Reading the last norm now, and not this one, keeps the device busy.
            if self._unread is not None:
                self._add(self._unread[0], self._unread[1].item())
            # The norm of a mean falls with the root of the number of labels.
            tokens = gradient[..., 0].numel()
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32) * (tokens / math.sqrt(labels or tokens))
            self._unread = microbatch.data_node, norm.to("cpu", non_blocking=True)
            few = len(self._medians) < 2 or sum(map(len, self._norms.values())) < FEW_NORMS
            times = ALONE_AT_MOST if few else GRADIENT_AT_MOST
            limit = times * median_low(self._medians.values()) if self._medians else math.inf
            is_usual = gradient.device.type == "cpu" and bool(norm <= limit)
            self._factors[microbatch] = None if is_usual else torch.clamp(limit / norm, max=1.0)
            if len(self._factors) > FACTORS_KEPT:
                self._factors.popitem(last=False)
        factor = self._factors[microbatch]
        return gradient if factor is None else gradient * factor.to(gradient.dtype)

    def _add(self, data_node: PeerId, norm: float) -> None:
        norms = self._norms.setdefault(data_node, deque(maxlen=NORMS_KEPT))
        norms.append(norm)
        self._medians[data_node] = median_low(norms)
        self._norms.move_to_end(data_node)
        if len(self._norms) > MOST_DATA_NODES:
            del self._medians[self._norms.popitem(last=False)[0]]


class Wire:
    """Decoder of a worker's received tensors and encoder of its results. Runs on the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clip = GradientClip()
        self.codec_s = 0.0  # Seconds spent encoding and decoding, including concurrent GPU work
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

    def gradient(self, job: Job, *, before_use: bool = False) -> Tensor:
        """Decodes a received gradient like `received`, and clips it."""
        received = self.received(job.gradient, before_use=before_use)
        return self._clip.clipped(job.key.microbatch, received, job.labels)

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
