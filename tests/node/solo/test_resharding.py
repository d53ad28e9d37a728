"""One process re-shards: documents are scored before they are trained on, and the router changes at outer steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from node.checkpoint.gather import gather_modules
from node.data.feed import open_documents
from node.experts.route_tables import BIAS, ENTRIES
from node.experts.router import Router
from node.solo.trainer import SoloTrainer, WholeModel
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import ModuleId
from tests.node.checkpoint.saved_states import folder_at
from tests.node.experts.routed import manifest_with, some_router
from tests.node.experts.test_route_tables import resharding

CPU = torch.device("cpu")
ROUTER = some_router((1, 2, 1))
STEPS = 30
ROUND = 10


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Documents of two kinds, so short that a block has many; the router knows nothing of the kinds."""
    random, folder = np.random.default_rng(1), tmp_path / "text"
    folder.mkdir()
    for number in range(300):
        letters = np.frombuffer((b"abcdefgh", b"stuvwxyz")[number % 2], np.uint8)
        (folder / f"{number:03}.txt").write_bytes(random.choice(letters, 30).tobytes())
    training = {
        "rows": 2,
        "inner_tokens": 64,
        "inner_steps": ROUND,
        "inner": {"learning_rate": 0.02},
        "outer": {"learning_rate": 1.0, "momentum": 0.0},
        "schedule": {"kind": "constant", "warmup_tokens": 64, "total_tokens": 6400},
    }
    plain = manifest_with(ROUTER, data__source=f"path:{folder}", training=training)
    return resharding(plain, 1.0)


def trainer_of(manifest: Manifest) -> SoloTrainer:
    torch.set_num_threads(1)
    return SoloTrainer(manifest, WholeModel(manifest, CPU), open_documents(manifest, router=ROUTER))


def steps(trainer: SoloTrainer, count: int) -> list[float]:
    losses = [trainer.step(lambda: False) for _ in range(count)]
    assert None not in losses
    return [loss for loss in losses if loss is not None]


def router_bytes(trainer: SoloTrainer) -> bytes:
    assert isinstance(trainer.router, Router)
    return trainer.router.to_bytes()


def test_the_router_is_another_after_an_outer_step_and_no_sooner(manifest: Manifest) -> None:
    trainer = trainer_of(manifest)
    seen = []
    for step in range(1, STEPS + 1):
        steps(trainer, 1)
        seen.append(router_bytes(trainer))
        if step % ROUND != 1 and step > 1:  # a round ends with the inner step that follows it
            assert seen[-1] == seen[-2]
    assert seen[0] == ROUTER.to_bytes()
    assert seen[-1] != ROUTER.to_bytes(), "something was learnt"


def test_scoring_changes_nothing_of_the_model(manifest: Manifest) -> None:
    """Within a block, which no other router reaches."""
    routing = manifest.routing
    assert routing is not None
    never = manifest.model_copy(update={"routing": routing.model_copy(update={"reshard": 1e-9})})
    assert steps(trainer_of(manifest), STEPS) == steps(trainer_of(never), STEPS)


def test_it_goes_on_where_it_was_saved_with_the_router_of_its_block(manifest: Manifest, tmp_path: Path) -> None:
    whole = trainer_of(manifest)
    steps(whole, STEPS)
    folder = folder_at(tmp_path / "checkpoint", manifest=manifest)
    whole.save(folder)
    again = trainer_of(manifest)
    assert again.resume(folder) == ()
    assert router_bytes(again) == router_bytes(whole)
    assert steps(again, 3) == pytest.approx(steps(whole, 3), abs=1e-6)
    tables = gather_modules(folder.path).modules[ModuleId(0)]
    assert tables[ENTRIES].abs().max() > 0
    assert tables[BIAS].shape == (2,)
