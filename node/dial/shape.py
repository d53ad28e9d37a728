"""The shape of a model of a wanted size: one dial after karpathy/nanochat.

Of all shapes that meet the number of parameters, the one whose width is nearest to `ASPECT` times the depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import Reasoned

SMALLEST: Final = 10**6
LARGEST: Final = 20 * 10**9
"""Parameters of a model that the dial makes."""
ASPECT: Final = 64
"""Width per block, as in nanochat. Half of Llama 2 7B's, which halves the bytes of hidden states on links."""
NEAR: Final = 0.04
"""Share by which the parameters may miss what was asked for, if that makes the shape a better one."""
WIDE: Final = 2048
"""From this width on heads are twice as wide."""
WIDEST: Final = 16_384
TIED_BELOW: Final = 4 * 10**9
GRID: Final = 64
"""Sizes are multiples of it, which tensor cores and blocks of codecs like."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; in elements, but for `blocks` and the heads."""

    vocabulary: int
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    feed_forward: int
    tied: bool

    @property
    def ends(self) -> int:
        """The parameters of stage 0: embedding, head and last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def block(self) -> int:
        """The parameters of one block."""
        kv_size = self.hidden // self.heads * self.kv_heads
        return self.hidden * (2 * self.hidden + 2 * kv_size + 3 * self.feed_forward) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        return self.ends + self.blocks * self.block


@dataclass(frozen=True, slots=True)
class ShapeChoices:
    """The choices of a model's shape, in the order in which they are told."""

    shape: Shape
    parameters: Reasoned[int]
    width: Reasoned[int]
    depth: Reasoned[int]
    heads: Reasoned[str]
    feed_forward: Reasoned[int]
    embeddings: Reasoned[str]


def choose_shape(parameters: int, vocabulary: int) -> ShapeChoices:
    """Chooses the shape for a number of parameters and a vocabulary. Raises ConfigError."""
    if not SMALLEST <= parameters <= LARGEST:
        raise ConfigError(
            f"--size of {parameters:,} parameters is not from {SMALLEST:,} to {LARGEST:,}",
            hint="Write it as 10m, 160m, 1.5b or 7b.",
        )
    shapes = list(_shapes(parameters, vocabulary))
    if not shapes:
        raise ConfigError(
            f"a model of {parameters:,} parameters has no room for a vocabulary of {vocabulary:,} and two blocks",
            hint="Ask for a larger --size, or for a tokenizer with fewer tokens.",
        )
    near = [shape for shape in shapes if _miss(shape, parameters) <= NEAR]
    if near:
        shape = min(near, key=lambda each: abs(math.log(each.hidden / each.blocks / ASPECT)))
    else:
        shape = min(shapes, key=lambda each: _miss(each, parameters))
    return _told(shape, parameters)


def _shapes(parameters: int, vocabulary: int) -> Iterator[Shape]:
    """For each width the depth that comes nearest."""
    for hidden in (*range(128, WIDE, 128), *range(WIDE, WIDEST + 1, 256)):
        heads = hidden // (64 if hidden < WIDE else 128)
        kv_heads = heads // 4 if heads % 4 == 0 else heads // 2
        wide = round(8 / 3 * hidden / GRID) * GRID
        one = Shape(vocabulary, hidden, 1, heads, kv_heads, wide, parameters < TIED_BELOW)
        blocks = round((parameters - one.ends) / one.block)
        if blocks < 2:
            return
        yield Shape(vocabulary, hidden, blocks, heads, kv_heads, wide, one.tied)


def _miss(shape: Shape, parameters: int) -> float:
    return abs(shape.parameters - parameters) / parameters


def _told(shape: Shape, parameters: int) -> ShapeChoices:
    head = shape.hidden // shape.heads
    missed = 100 * (shape.parameters / parameters - 1)
    a_share = shape.heads // shape.kv_heads
    tied = f"one matrix for both, as models below {TIED_BELOW // 10**9}b have it: stage 0 takes half as much memory"
    apart = f"a matrix each, as models from {TIED_BELOW // 10**9}b on have it"
    return ShapeChoices(
        shape,
        Reasoned(shape.parameters, f"{missed:+.1f} % of the {parameters:,} asked for"),
        Reasoned(
            shape.hidden,
            f"{shape.hidden / shape.blocks:.0f} for each block, about {ASPECT} as in nanochat; "
            "links carry hidden states, so a narrow deep model needs less of them",
        ),
        Reasoned(shape.blocks, "what the wanted parameters leave for this width"),
        Reasoned(
            f"{shape.heads} of {head}, {shape.kv_heads} for keys and values",
            f"{head} as models of this width have; keys and values for groups of {a_share}, as in Llama 3",
        ),
        Reasoned(shape.feed_forward, "8/3 of the width, as SwiGLU costs three matrices where others have two (Llama)"),
        Reasoned("tied" if shape.tied else "apart", tied if shape.tied else apart),
    )
