"""Residual stream of few numbers per token: x = T[token] + c U, after Protocol Models (arXiv:2506.01260).

Blocks read x [tokens, hidden] and write to c [tokens, K]. T, a fixed row for each token, and U, K orthonormal
directions, follow from the run's seed. Hidden states are c and, as further channels, the bytes of the token's number.
With `model.token_rank`, each block and the head add trained rows of their own to x (`node.model.blocks.TokenRows`).
"""

import hashlib
import math
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn

from protocol.manifest.manifest import ModelSection

# Dtype of hidden states and matrix products by `model.dtype`
HIDDEN_TYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL: Final = 0.02  # Standard deviation of T, embedding and head, which makes the first loss close to ln(vocabulary)
TABLE_BYTES: Final = 2**26  # Largest T that is kept. Of a larger one, rows are computed for each microbatch.
_CHUNK: Final = 2**18  # Elements of T computed at a time (2 MiB), so that they stay in the processor's cache
_WORD: Final = 2**32 - 1


class Stream(NamedTuple):
    """What blocks read from the hidden states of one microbatch, and how they add to them. Default: all of `hidden`."""

    rows: Tensor | None = None  # Of each token: T and the block's own rows, [rows, tokens, hidden]
    directions: Tensor | None = None  # U, [K, hidden]
    tokens: Tensor | None = None  # Token numbers, int64 [rows, tokens]

    def read(self, hidden: Tensor) -> Tensor:
        if self.rows is None:
            return hidden
        if self.directions is None:
            return hidden + self.rows
        count, width = self.directions.shape
        numbers = hidden[..., :count].reshape(-1, count)
        return torch.addmm(self.rows.view(-1, width), numbers, self.directions).view(self.rows.shape)

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        if self.directions is None:
            return hidden + output
        return hidden + F.pad(output, (0, hidden.shape[-1] - output.shape[-1]))  # token numbers stay


WIDE: Final = Stream()


class Residual(nn.Module):
    """Constants of the residual stream."""

    directions: Tensor | None

    def __init__(self, section: ModelSection, seed: int) -> None:
        super().__init__()
        self.section, self.seed = section, seed
        self.dtype = HIDDEN_TYPES[section.dtype]
        rows = directions(seed, section.residual, section.hidden).to(self.dtype) if section.residual else None
        self.register_buffer("directions", rows, persistent=False)

    def begin(self, embedded: Tensor, tokens: Tensor) -> Tensor:
        """Makes hidden states of embedded tokens [..., stream] and their int64 numbers [...]."""
        parts = [(tokens >> 8 * place) & 0xFF for place in range(self.section.token_bytes)]
        hidden = embedded.to(self.dtype)
        return torch.cat((hidden, torch.stack(parts, -1).to(self.dtype)), -1) if parts else hidden

    def stream(self, hidden: Tensor, tokens: Tensor | None = None) -> Stream:
        """Returns how to read these hidden states. `tokens` [...] are needed only at full width (see `full_width`)."""
        if self.directions is None:
            return Stream(tokens=tokens)
        tokens = token_numbers(hidden.detach()[..., len(self.directions) :])
        return Stream(self.fixed(tokens), self.directions, tokens)

    def fixed(self, tokens: Tensor) -> Tensor:
        """Returns T of int64 tokens [...] below the vocabulary: [..., hidden]."""
        section, device = self.section, tokens.device
        if section.vocabulary * section.hidden * self.dtype.itemsize <= TABLE_BYTES:
            return F.embedding(tokens, _table(self.seed, section.vocabulary, section.hidden, self.dtype, device))
        if device.type != "cpu":  # finding distinct tokens would wait for the device
            rows = fixed_rows(self.seed, tokens.flatten(), section.hidden, self.dtype)
            return rows.view(*tokens.shape, -1)
        distinct, places = torch.unique(tokens, return_inverse=True)
        return F.embedding(places, fixed_rows(self.seed, distinct, section.hidden, self.dtype))


def token_numbers(octets: Tensor) -> Tensor:
    """Returns the int64 token numbers [...] that these bytes [..., bytes] make, little-endian."""
    parts = octets.to(torch.int64).unbind(-1)
    return sum((part << 8 * place for place, part in enumerate(parts)), torch.zeros_like(parts[0]))


@lru_cache(maxsize=8)  # one for each of this process's devices
def _table(seed: int, vocabulary: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training in this process may use it later
        return fixed_rows(seed, torch.arange(vocabulary, device=device), width, dtype)


@torch.no_grad()
def fixed_rows(seed: int, tokens: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes T of int64 tokens [n]: [n, width], uniform with deviation SMALL, the same bits on all devices."""
    of_tokens, of_columns = np.frombuffer(_digest("rows", seed), "<u4")[:2].tolist()
    rows = _mixed(_mixed(tokens) ^ of_tokens)
    columns = _mixed(torch.arange(width, device=tokens.device) ^ of_columns)
    found = torch.empty(len(tokens), width, dtype=dtype, device=tokens.device)
    at_once = max(1, _CHUNK // width)
    for start in range(0, len(tokens), at_once):
        part = slice(start, start + at_once)
        # 24 bits as an odd integer between -2^24 and 2^24: exact in float32, so that only the product is rounded
        odd = _mixed(rows[part, None] ^ columns).bitwise_right_shift_(8).mul_(2).sub_(2**24 - 1)
        found[part] = odd.to(torch.float32).mul_(SMALL * math.sqrt(3) / 2**24)
    return found


def _mixed(words: Tensor) -> Tensor:
    """Returns a hash of 32-bit words in int64 (C. Wellons, hash-prospector). No product exceeds 63 bits."""
    words = (words ^ (words >> 16)).mul_(0x21F0AAAD).bitwise_and_(_WORD)
    words.bitwise_xor_(words >> 15).mul_(0x735A2D97).bitwise_and_(_WORD)
    return words.bitwise_xor_(words >> 15)


def directions(seed: int, count: int, width: int) -> Tensor:
    """Computes U: `count` orthonormal rows, float32 [count, width], of a cosine basis with random signs of columns."""
    drawn = np.random.Philox(key=int.from_bytes(_digest("directions", seed)[:16], "little")).random_raw(2 * width)
    frequencies = np.sort(np.argsort(drawn[:width], kind="stable")[:count])
    # DCT-II in float64, rounded once: orthonormal for every width, without a matrix decomposition.
    rows = np.cos(np.pi / width * np.outer(frequencies, np.arange(width) + 0.5)) * math.sqrt(2 / width)
    rows[frequencies == 0] /= math.sqrt(2)
    rows *= np.where(drawn[width:] >> np.uint64(63), 1.0, -1.0)
    return torch.from_numpy(rows.astype(np.float32))


def _digest(what: str, seed: int) -> bytes:
    return hashlib.sha256(f"skipstone-residual-{what}:{seed}".encode()).digest()
