"""Weight initialisation as a pure function of (seed, parameter name), bit-identical on every machine.

Torch's normal numbers differ in the last bit between processors. Here each weight is an exact sum of four 16-bit
integers from a Philox counter generator (Salmon et al. 2011), scaled by one float32 product.
"""

import hashlib
import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from node.model.blocks import RMSNorm, packed_weights
from node.model.optimizers.packed import Floats
from node.model.residual import SMALL
from node.model.shapes import EMBEDDING, HEAD, has_row_per_token, writes

_CHUNK: Final = 2**20  # Integers drawn at a time (8 MiB)
_SUM_MEAN: Final = 4 * 65_535 // 2
_SUM_DEVIATION: Final = math.sqrt(4 * (65_536**2 - 1) / 12)


@torch.no_grad()
def initialise(parts: Iterable[nn.Module], *, seed: int, gain: float = 1.0) -> None:
    """Fills the parameters with initial values, with which blocks are the identity (arXiv:1901.09321).

    Args:
        gain: factor for the embedding. A narrow residual stream needs sqrt(width / numbers).
    """
    for part in parts:
        norms = {id(module.weight) for module in part.modules() if isinstance(module, RMSNorm)}
        for name, parameter in part.named_parameters():
            if id(parameter) in norms:
                parameter.fill_(1.0)
            elif parameter.dim() == 1 or writes(name):  # biases, and outputs that would drown small embeddings
                parameter.zero_()
            else:
                deviation = standard_deviation(name, parameter.shape[1], gain)
                parameter.copy_(near_normal(seed, name, parameter.shape, deviation))


def standard_deviation(name: str, fan_in: int, gain: float = 1.0) -> float:
    if name == HEAD or has_row_per_token(name):
        return SMALL * gain if name == EMBEDDING else SMALL
    return 1 / math.sqrt(fan_in)


def near_normal(seed: int, name: str, shape: Iterable[int], deviation: float) -> Tensor:
    """Returns an approximately normal float32 tensor with mean 0 and the given standard deviation."""
    shape = tuple(shape)
    # The key depends on the name alone, so every machine can initialise just its own stage.
    key = hashlib.sha256(f"skipstone-initial:{seed}:0:{name}".encode()).digest()
    generator = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    scale = np.float32(deviation / _SUM_DEVIATION)
    values = np.empty(math.prod(shape), dtype=np.float32)
    for start in range(0, values.size, _CHUNK):
        piece = values[start : start + _CHUNK]
        raw = generator.random_raw(piece.size)
        total = np.full(piece.size, -_SUM_MEAN, dtype=np.int32)
        for shift in (0, 16, 32, 48):
            total += ((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int32)
        np.multiply(total.astype(np.float32), scale, out=piece)  # |total| < 2**24, so the cast is exact
    return torch.from_numpy(values.reshape(shape))


def parameters_of(*parts: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters by name, detached, with shared memory. Tied parameters appear under the first name."""
    named: dict[nn.Parameter, str] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            named.setdefault(parameter, name)
    return {name: parameter.detach() for parameter, name in named.items()}


def floats_of(*parts: nn.Module) -> dict[str, Floats]:
    """Returns `parameters_of`, with the SplitWeight in place of each parameter that was split."""
    packed = {parameter.data_ptr(): held for part in parts for parameter, held in packed_weights(part).items()}
    return {name: packed.get(tensor.data_ptr(), tensor) for name, tensor in parameters_of(*parts).items()}


def digest_of_tensors(tensors: dict[str, Tensor]) -> bytes:
    """Returns the SHA-256 digest (32 bytes) of names, shapes and little-endian float32 values, sorted by name."""
    hasher = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
        hasher.update(f"{name}\0{','.join(map(str, values.shape))}\0".encode())
        hasher.update(values.reshape(-1).view(np.uint8).data)
    return hasher.digest()
