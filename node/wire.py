"""A worker's side of the wire: received tensors decoded onto its device, results encoded as the link wants them."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from node.tensors import relative_error, tensor_of
from node.work import Job, Output
from protocol.codecs import Encoded, encode


class Wire:
    """A worker's tensors as they come and go, on its device. Runs on the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.codec_s = 0.0
        """Seconds spent on encoding and decoding. (What a GPU does meanwhile by itself is in them.)"""

    def received(self, tensor: Encoded | None) -> Tensor:
        """As `tensor_of`."""
        assert tensor is not None, "custody asks for nothing before its tensors are there"
        begun = time.perf_counter()
        received = tensor_of(tensor, self.device)
        self.codec_s += time.perf_counter() - begun
        return received

    def output(self, tensor: Tensor, job: Job, loss: float | None = None) -> Output:
        """What a job sends on, encoded as it wishes. With NONE, on the CPU, it is the memory of the tensor itself, which must not be written any more."""
        begun = time.perf_counter()
        tensor = tensor.detach().contiguous()
        encoded = encode(tensor, job.codec)
        error = relative_error(tensor, encoded) if job.check_codec and encoded.spec.codec is job.codec else None
        self.codec_s += time.perf_counter() - begun
        return Output(encoded, loss, error=error)
