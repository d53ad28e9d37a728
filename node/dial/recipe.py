"""The recipe of a run's training: rows, tokens of a step, learning rate, schedule, rounds.

Tokens of a step and learning rate are DeepSeek LLM's fits (arXiv:2401.02954, section 3.1) to the compute C = 6 x
parameters x tokens: 0.2920 x C^0.3271 and 0.3118 x C^-0.1250. The run's tokens are 20 a parameter (Hoffmann et al.,
arXiv:2203.15556) where nobody says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.types import Codec, Reasoned

TOKENS_A_PARAMETER: Final = 20
MICROBATCH_TOKENS: Final = 4096
SEQUENCES: Final = ((50 * 10**6, 512), (500 * 10**6, 1024))
"""Below so many parameters rows have so many tokens, ..."""
LONGEST: Final = 2048
"""... and from there on so many."""
WARM_UP: Final = 0.02
LONGEST_WARM_UP_STEPS: Final = 2000
INNER_STEPS: Final = (10, 20, 50, 100, 200, 500)
ROUND_SHARE: Final = 0.05
"""Of what a replica sends while it trains, a round may add so much."""
SHORTEST_ROUND_S: Final = 900
SLOW_LINK_BYTES_PER_S: Final = 2.5e6
FRAGMENTS: Final = 8
LARGE_STAGE: Final = 100 * 10**6
"""Parameters from which a stage is averaged in fragments (streaming DiLoCo, arXiv:2501.18512)."""
ACTIVATIONS: Final = Codec.INT8
PSEUDO_GRADIENTS: Final = Codec.INT4


@dataclass(frozen=True, slots=True)
class Recipe:
    """The choices of a run's training, in the order in which they are told."""

    sequence: Reasoned[int]
    rows: Reasoned[int]
    total_tokens: Reasoned[int]
    step_tokens: Reasoned[int]
    learning_rate: Reasoned[float]
    warmup_tokens: Reasoned[int]
    inner_steps: Reasoned[int]
    round_seconds: Reasoned[int]
    fragments: Reasoned[int]


def choose_rows(parameters: int) -> tuple[Reasoned[int], Reasoned[int]]:
    """Chooses the tokens of a row and the rows of a microbatch."""
    sequence = next((tokens for below, tokens in SEQUENCES if parameters < below), LONGEST)
    rows = MICROBATCH_TOKENS // sequence
    return (
        Reasoned(sequence, "longer rows for larger models, which make more of them"),
        Reasoned(
            rows, f"{rows * sequence:,} tokens a microbatch: enough to keep a GPU busy, few enough to be held by many"
        ),
    )


def choose_recipe(
    parameters: int, largest_stage: int, hidden: int, stages: int, replicas: int, total_tokens: int | None
) -> Recipe:
    """Chooses how a model of so many parameters is trained; `replicas` of each stage as far as known."""
    sequence, rows = choose_rows(parameters)
    microbatch = sequence.value * rows.value
    wanted = f"{TOKENS_A_PARAMETER} for each parameter: more would rather train a larger model (Chinchilla)"
    total = TOKENS_A_PARAMETER * parameters if total_tokens is None else total_tokens
    compute = 6.0 * parameters * total
    best = 0.2920 * compute**0.3271
    least = 2 * stages
    step = max(least, round(best / replicas / microbatch)) * microbatch
    shared = f", shared by {replicas} replicas" if replicas > 1 else ""
    said = f"{best:,.0f} are best for this compute (DeepSeek LLM){shared}; whole microbatches, {least} at least"
    steps = max(1, total // (step * replicas))
    warm_steps = max(1, min(LONGEST_WARM_UP_STEPS, round(WARM_UP * steps)))
    warm = min(warm_steps * step * replicas, total // 2)
    return Recipe(
        sequence,
        rows,
        Reasoned(total, wanted if total_tokens is None else "asked for"),
        Reasoned(step, said),
        Reasoned(float(f"{min(1e-2, 0.3118 * compute**-0.1250):.2g}"), "what is best for this compute (DeepSeek LLM)"),
        Reasoned(
            warm, f"{WARM_UP:.0%} of the tokens, {LONGEST_WARM_UP_STEPS:,} steps at most; then a cosine to a tenth"
        ),
        _inner_steps(largest_stage, hidden, step),
        _round_seconds(largest_stage),
        _fragments(largest_stage),
    )


def _inner_steps(largest_stage: int, hidden: int, step: int) -> Reasoned[int]:
    """The fewest with which a round is little beside the hidden states that a replica sends meanwhile."""
    a_round = _round_bytes(largest_stage)
    a_step = 2 * TensorSpec((step, hidden), DType.BFLOAT16, ACTIVATIONS).byte_length
    shares = {steps: a_round / (steps * a_step) for steps in INNER_STEPS}
    chosen = next((steps for steps in INNER_STEPS if shares[steps] <= ROUND_SHARE), INNER_STEPS[-1])
    reason = f"a round adds {shares[chosen]:.1%} to what a replica sends; replicas that meet more often learn better"
    return Reasoned(chosen, reason)


def _round_seconds(largest_stage: int) -> Reasoned[int]:
    """The seconds after which a round is due, however few steps were taken."""
    carried = SLOW_LINK_BYTES_PER_S * ROUND_SHARE
    seconds = max(SHORTEST_ROUND_S, -(-round(_round_bytes(largest_stage) / carried) // 100) * 100)
    return Reasoned(seconds, f"at the latest: on a link of 20 Mbit/s a round takes {ROUND_SHARE:.0%} of that at most")


def _round_bytes(largest_stage: int) -> int:
    """What a replica sends in a round at most: its contribution, and the means that it has reduced."""
    return 2 * TensorSpec((largest_stage,), DType.FLOAT32, PSEUDO_GRADIENTS).byte_length


def _fragments(largest_stage: int) -> Reasoned[int]:
    if largest_stage < LARGE_STAGE:
        return Reasoned(1, "stages are small enough to be averaged at once")
    return Reasoned(FRAGMENTS, "a large stage is averaged part by part, so that links are never full of rounds")
