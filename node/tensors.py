"""Between the bytes of the wire and tensors on the compute device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from protocol.codecs import Encoded, decode
from protocol.codecs.memory import ELEMENT_TYPES
from swarm.errors import ProtocolViolation, ResourceExhausted
from swarm.vocabulary import Codec

_NO_MEMORY: Final = re.compile(
    "can't allocate memory|not enough memory|bad_alloc|could not create a (memory|primitive)", re.IGNORECASE
)
"""What torch says of it on the CPU, and oneDNN and C++ underneath it: bare RuntimeErrors."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Maps the compute device's running out of memory to ResourceExhausted, which costs one microbatch and not the node."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError, too
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        raise ResourceExhausted(
            f"the compute device is out of memory: {str(error)[:200]}",
            hint="Start the node with a smaller --memory or fewer --slots.",
        ) from None


def tensor_of(encoded: Encoded, device: torch.device) -> Tensor:
    """The tensor that came. On the CPU, with NONE, it shares the memory that it came in; else it is a new one.

    Raises:
        ProtocolViolation: it is no encoding, or an element is not finite. (A sum is not finite when an element is not; a sum of finite
            ones that overflows is beyond any use as well.)
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
    """Length of what the encoding changes, over that of the tensor; 0 for a tensor of zeros."""
    decoded = tensor_of(encoded, tensor.device).float()
    length = torch.linalg.vector_norm(tensor.float()).item()
    return torch.linalg.vector_norm(decoded - tensor.float()).item() / length if length else 0.0


def bytes_of_tensor(tensor: Tensor) -> memoryview:
    """The elements in row-major order; on the CPU the memory of the tensor itself, which must not be written any more."""
    plain = tensor.detach().to("cpu").contiguous()
    return plain.view(torch.uint8).numpy().reshape(-1).data


def copied(tensor: Tensor) -> Tensor:
    """A float32 copy on the CPU that shares no memory with the tensor, so that another thread may read it meanwhile."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
