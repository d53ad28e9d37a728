"""Between the bytes of the wire and tensors on the compute device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from protocol.tensor_spec import DType, TensorSpec
from swarm.errors import ProtocolViolation, ResourceExhausted

ELEMENT_TYPES: Final = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


@contextmanager
def device_errors() -> Iterator[None]:
    """Maps the compute device's running out of memory to ResourceExhausted, which costs one microbatch and not the node."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceExhausted(
            f"the compute device is out of memory: {str(error)[:200]}",
            hint="Start the node with a smaller --memory or fewer --slots.",
        ) from None


def tensor_from_bytes(data: memoryview, spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor of `spec`'s shape. On the CPU it shares the memory of `data`; elsewhere it is a copy.

    Raises:
        ProtocolViolation: an element is not finite. (A sum is not finite when an element is not; a sum of finite ones that overflows
            is beyond any use as well.)
    """
    tensor = torch.frombuffer(data, dtype=ELEMENT_TYPES[spec.dtype]).view(spec.shape).to(device)
    if not torch.isfinite(tensor.sum(dtype=torch.float32)):
        raise ProtocolViolation("the tensor has elements that are not finite")
    return tensor


def bytes_of_tensor(tensor: Tensor) -> memoryview:
    """The elements in row-major order; on the CPU the memory of the tensor itself, which must not be written any more."""
    plain = tensor.detach().to("cpu").contiguous()
    return plain.view(torch.uint8).numpy().reshape(-1).data


def copied(tensor: Tensor) -> Tensor:
    """A float32 copy on the CPU that shares no memory with the tensor, so that another thread may read it meanwhile."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
