"""Held-out loss at equal tokens: whole documents against one concatenated stream, in one process.

Both runs read the same text in the same order with the same model, schedule and number of tokens; only the manifest's
`model.attention` differs. Both are measured on the same held-out documents, each by itself from its beginning: rows of
a stream, whose model has seen documents begin anywhere, are measured as they would be used.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.data.feed import held_out_microbatches, open_documents
from node.solo.trainer import SoloTrainer, WholeModel, evaluate
from protocol.manifest.manifest import Manifest, manifest_from_table

WORST: Final = 1.005
"""Of the loss of concatenation."""
ARMS: Final = ("documents", "causal")


@dataclass(frozen=True, slots=True)
class Task:
    hidden: int
    sequence: int
    rows: int
    microbatches: int
    """Of a step."""
    steps: int
    held_out: int
    source: str = "python-stdlib"


TASK: Final = Task(hidden=48, sequence=512, rows=4, microbatches=2, steps=300, held_out=40)
QUICK: Final = Task(hidden=16, sequence=32, rows=2, microbatches=1, steps=3, held_out=2)


def manifest_of(task: Task, attention: str, seed: int) -> Manifest:
    step = task.microbatches * task.rows * task.sequence
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "loss",
            "seed": seed,
            "model": {
                "vocabulary": 257,
                "hidden": task.hidden,
                "heads": 4,
                "kv_heads": 4,
                "feed_forward": 8 * task.hidden // 3,
                "sequence": task.sequence,
                "attention": attention,
            },
            "stages": {"blocks": [0, 2]},
            "data": {"source": task.source, "held_out": 0.05},
            "training": {
                "rows": task.rows,
                "inner_tokens": step,
                "inner": {"learning_rate": 4e-3},
                "schedule": {"warmup_tokens": step * task.steps // 20, "total_tokens": step * task.steps},
            },
        }
    )


def held_out_loss(task: Task, attention: str, seed: int) -> float:
    """Nats per token after the tokens of the task."""
    torch.set_num_threads(1)
    manifest = manifest_of(task, attention, seed)
    model = WholeModel(manifest, torch.device("cpu"))
    trainer = SoloTrainer(manifest, model, open_documents(manifest))
    while trainer.tokens < task.steps * manifest.training.inner_tokens:
        trainer.step(lambda: False)
    found = evaluate(model, held_out_microbatches(manifest_of(task, "documents", seed), task.held_out))
    return float(found["loss"])


def measure_loss(task: Task, seeds: Sequence[int], tell: Callable[[str], None]) -> dict[str, Any]:
    losses: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        for arm in ARMS:
            losses[arm].append(held_out_loss(task, arm, seed))
            tell(f"loss, seed {seed}, {arm}: {losses[arm][-1]:.4f}")
    ratios = [ours / theirs for ours, theirs in zip(losses["documents"], losses["causal"], strict=True)]
    return {
        "losses": {arm: [round(loss, 4) for loss in of] for arm, of in losses.items()},
        "documents_over_causal": [round(ratio, 4) for ratio in ratios],
        "median": round(statistics.median(ratios), 4),
        "perplexity": round(math.exp(statistics.median(losses["documents"]) - statistics.median(losses["causal"])), 4),
        "bar": WORST,
    }
