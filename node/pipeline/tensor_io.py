"""Conversion between the bytes of the wire and tensors on the compute device.

A worker's side of the wire: received tensors decoded onto its device, results encoded as the link wants them.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from node.pipeline.interfaces import Job, Output
from protocol.codecs import Encoded, decode, encode
from protocol.codecs.views import ELEMENT_TYPES
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec


def tensor_of(encoded: Encoded, device: torch.device) -> Tensor:
    """The tensor that a message brought. On the CPU, with NONE, it shares the memory that it came in; else it is a new
    one.

    Raises:
        ProtocolViolation: it is no encoding, or an element is not finite. (A sum is not finite when an element is not;
            a sum of finite ones that overflows is beyond any use as well.)
    """
    spec, kind = encoded.spec, ELEMENT_TYPES[encoded.spec.dtype]
    if spec.codec is Codec.NONE:
        tensor = torch.frombuffer(encoded.data, dtype=kind).view(spec.shape).to(device)
    else:
        tensor = torch.empty(spec.shape, dtype=kind, device=device)
        decode(spec, encoded.data, tensor)
    if not torch.isfinite(tensor.sum(dtype=torch.float32)):
        raise ProtocolViolation("the tensor has elements that are not finite")
    return tensor


def relative_error(tensor: Tensor, encoded: Encoded) -> float:
    """The relative error of an encoding: length of what it changes, over that of the tensor; 0 for a tensor of
    zeros.
    """
    decoded = tensor_of(encoded, tensor.device).float()
    length = torch.linalg.vector_norm(tensor.float()).item()
    return torch.linalg.vector_norm(decoded - tensor.float()).item() / length if length else 0.0


class Wire:
    """The conversion of a worker's tensors as they come and go, on its device. Runs on the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.codec_s = 0.0
        """Seconds spent on encoding and decoding. (What a GPU does meanwhile by itself is in them.)"""

    def received(self, tensor: Encoded | None) -> Tensor:
        """The tensor that a message brought, as `tensor_of`."""
        assert tensor is not None, "custody asks for nothing before its tensors are there"
        begun = time.perf_counter()
        received = tensor_of(tensor, self.device)
        self.codec_s += time.perf_counter() - begun
        return received

    def output(self, tensor: Tensor, job: Job, loss: float | None = None) -> Output:
        """The output of a job, encoded as it wishes. With NONE, on the CPU, it is the memory of the tensor itself,
        which must not be written any more.
        """
        begun = time.perf_counter()
        tensor = tensor.detach().contiguous()
        encoded = encode(tensor, job.codec)
        error = relative_error(tensor, encoded) if job.check_codec and encoded.spec.codec is job.codec else None
        self.codec_s += time.perf_counter() - begun
        return Output(encoded, loss, error=error)
