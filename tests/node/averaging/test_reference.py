"""Twenty real rounds against the same algorithm in plain torch, and what the parity benchmark rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.parity import REPLICAS, TASK, Dealer, Reference, Replica, Rule, difference, manifest_of
from node.data.feed import open_documents
from node.model.initialization import parameters_of

TINY = replace(TASK, hidden=16, feed_forward=24, sequence=16, rows=2, microbatches=1)
SEED = 5


@pytest.mark.parametrize(("outer_rate", "outer_momentum"), [(0.7, 0.9), (1.0, 0.0)])
async def test_twenty_rounds_lead_to_the_parameters_of_the_reference(outer_rate: float, outer_momentum: float) -> None:
    assert await difference(TINY, SEED, Rule(2, 1e-3, 0.0, outer_rate, outer_momentum), rounds=20) <= 1e-5


async def test_another_outer_rule_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.parity.Reference", lambda replicas, rule: Reference(replicas, Rule(2, 1e-3, 0.0, 0.7, 0.8))
    )
    assert await difference(TINY, SEED, Rule(2, 1e-3, 0.0, 0.7, 0.9), rounds=6) > 1e-4


def test_replicas_together_read_what_one_process_reads() -> None:
    manifest = manifest_of(TINY, SEED, 1e-3, REPLICAS)
    documents = open_documents(manifest)
    dealt, whole = Dealer(manifest, documents, 3), Dealer(manifest, documents, 3)
    for _ in range(3):
        shares, step = dealt.a_step(), whole.a_whole_step()
        together = [shares[number % REPLICAS][number // REPLICAS] for number in range(len(step))]
        assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(together, step, strict=True))


def test_a_copy_of_a_learner_takes_the_same_steps() -> None:
    manifest = manifest_of(TINY, SEED, 1e-3, REPLICAS)
    dealer = Dealer(manifest, open_documents(manifest), 1)
    first, second = Replica(manifest), Replica(manifest)
    for _ in range(3):
        first.step(dealer.a_whole_step())
    second.follow(first)
    step = dealer.a_whole_step()
    assert first.step(step) == second.step(step)
    there = parameters_of(*second.parts)
    assert all(torch.equal(tensor, there[name]) for name, tensor in parameters_of(*first.parts).items())
