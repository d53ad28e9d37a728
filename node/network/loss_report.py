"""The report of a model's held-out loss, and the paths on which it is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from protocol.manifest.manifest import Manifest
from swarm.routing.stage_balance import chosen_subsets
from swarm.vocabulary.errors import ProtocolViolation


@dataclass(frozen=True, slots=True)
class AskedPaths:
    """The paths of an evaluation: which stages of a model are to be run."""

    stages_per_path: int | None = None
    """Of those after stage 0; None for all of them."""
    every_subset: bool = False
    """The whole ring of evenly spread choices, and not only the first."""

    def of(self, manifest: Manifest) -> tuple[tuple[int, ...], ...]:
        """The paths through the stages after stage 0 of each.

        Raises:
            ConfigError: the run has not so many stages.
        """
        return chosen_subsets(manifest.stages.count, self.stages_per_path, every=self.every_subset)


WHOLE_MODEL: Final = AskedPaths()


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Held-out loss on one path."""

    loss: float
    """Nats per token."""
    tokens: int
    microbatches: int


def loss_report(measured: Sequence[tuple[tuple[int, ...], HeldOutLoss]]) -> dict[str, Any]:
    """The report that `eval --json` prints: loss (nats per token, the mean over the paths), tokens and microbatches of
    the text, and of each path in `subsets` its stages after stage 0 and its loss. All paths have been measured on the
    same text.
    """
    _, first = measured[0]
    return {
        "loss": math.fsum(each.loss for _, each in measured) / len(measured),
        "tokens": first.tokens,
        "microbatches": first.microbatches,
        "subsets": [{"stages": list(stages), "loss": each.loss} for stages, each in measured],
    }


def loss_in(answer: Mapping[str, Any]) -> HeldOutLoss:
    """Parses the loss in a data node's answer.

    Raises:
        ProtocolViolation: it is none.
    """
    loss, tokens, microbatches = (answer.get(key) for key in ("loss", "tokens", "microbatches"))
    if not (isinstance(loss, float) and type(tokens) is int and type(microbatches) is int):
        raise ProtocolViolation("the answer is not that of an evaluation")
    return HeldOutLoss(loss, tokens, microbatches)
