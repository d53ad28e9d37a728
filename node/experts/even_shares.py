"""The bias of each expert that gives it an equal share of the tokens: whoever gets too many is moved down, and those
documents go elsewhere that lose the least by it.

It stands alone because routers are fitted with it, and blocks are packed with it: among the few hundred documents of a
block, some of them large, experts have by chance other shares than in the text. A bias beside the scores instead of a
term in a loss: Wang et al. 2024 (arXiv:2408.15664).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

TRIES: Final = 60


def even_bias(scores: Integers, sizes: Integers, most: float) -> Integers:
    """The bias by which no expert has more than `most` times an equal share; if there is none that is found, the one
    with which the largest share is the smallest, for a single document may be large.

    Args:
        scores: [documents, experts]
        sizes: the tokens of each document.
    """
    experts = scores.shape[1]
    bias = best = np.zeros(experts, dtype=np.int64)
    step, least = max(1, int(np.abs(scores).mean())), math.inf
    for _ in range(TRIES):
        shares = shares_of_tokens(scores + bias, sizes)
        if shares.max() < least:
            best, least = bias, float(shares.max())
        if least * experts <= most:
            break
        bias = bias + np.rint(step * (1 / experts - shares) * experts).astype(np.int64)
        step = max(1, int(step * 0.9))
    return best - int(best.mean())


def shares_of_tokens(scores: Integers, sizes: Integers) -> npt.NDArray[np.float64]:
    """The share of each expert where every document goes to the best."""
    found: npt.NDArray[np.float64] = np.bincount(scores.argmax(axis=1), sizes, scores.shape[1]) / sizes.sum()
    return found
