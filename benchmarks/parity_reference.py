"""Outer steps in plain torch, in one process: what `benchmarks.parity` holds the real rounds against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.parity_learner import Learner, Rule
from node.averaging.anchor.shared_vector import Vector
from node.data.packing import Microbatch


class OuterReference:
    """torch.optim.SGD on the mean of (anchor - replica), weighted by tokens (Douillard et al. 2023, arXiv:2311.08105).

    It has an anchor and a momentum of its own, which nothing sets right, so that a difference to the real rounds stays
    or grows.
    """

    def __init__(self, start: Vector, rule: Rule) -> None:
        self._anchor = torch.nn.Parameter(torch.from_numpy(start.copy()))
        nesterov = rule.outer_momentum > 0  # torch refuses it without momentum, where it would change nothing
        self._outer = torch.optim.SGD(
            [self._anchor], lr=rule.outer_rate, momentum=rule.outer_momentum, nesterov=nesterov
        )

    def step(self, replicas: Sequence[Vector], tokens: Sequence[int]) -> Vector:
        """The new anchor. `replicas` are their parameters [elements], `tokens` what each was trained on in this
        round."""
        anchor = self._anchor.detach()
        gradient = torch.zeros_like(anchor)
        for replica, share in zip(replicas, np.array(tokens, np.float64) / sum(tokens), strict=True):
            gradient += float(share) * (anchor - torch.from_numpy(replica))
        self._anchor.grad = gradient
        self._outer.step()
        values: Vector = self._anchor.detach().numpy().copy()
        return values


class Reference:
    """The whole algorithm: learners that step in turn, and an outer step of the reference after each round."""

    def __init__(self, learners: Sequence[Learner], rule: Rule) -> None:
        self._learners = learners
        self._tokens = learners[0].optimizer.tokens
        self._outer = OuterReference(learners[0].vector(), rule)

    def a_round(self, steps: Sequence[Sequence[Sequence[Microbatch]]]) -> Vector:
        """Takes these inner steps (of each, what each replica gets) and the outer step; returns the new anchor, on
        which all replicas stand."""
        tokens = [0] * len(self._learners)
        for dealt in steps:
            for number, (learner, microbatches) in enumerate(zip(self._learners, dealt, strict=True)):
                learner.step(microbatches)
                tokens[number] += sum(microbatch.size for microbatch in microbatches)
        anchor = self._outer.step([learner.vector() for learner in self._learners], tokens)
        self._tokens += sum(tokens)
        for learner in self._learners:
            learner.write(anchor)
            learner.optimizer.tokens, learner.optimizer.replicas = self._tokens, len(self._learners)
        return anchor
