"""What training takes of memory: bytes a parameter of a stage peer on a card, and loss and head of a large vocabulary.

The card is the tests' pretend device, on which every tensor is metered: a bfloat16 run, AdamW, messages of so few
tokens that activations weigh nothing beside the parameters, and no room to keep graphs. Loss and head are float32 on
the CPU, the whole job of a data node (loss, gradients, their addition to its sums): as it is, and as it was, with the
logits computed again piece by piece in the backward pass, whose gradients came as a whole. Each in a process of its
own, with one thread; the peak is of resident memory above what matrix and sums take, the time is the processor's, and
they take turns, so that what else the machine does meets both alike.

    python -m benchmarks.memory [--vocabulary N] [--hidden N] [--tokens N] [--rounds N]

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from node.model.head_loss import HeadSum, loss_and_gradient
from node.model.optimizer import are_finite, fold
from node.model.parts import LOGITS_AT_ONCE

ROOT: Final = Path(__file__).resolve().parent.parent
LOGITS_AT_ONCE_BEFORE: Final = 2**24
MIB: Final = 2**20
SAMPLE: Final = 997
"""Rows of the matrix between two that are compared."""

Job = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def in_one_pass(hidden: Tensor, matrix: Tensor, labels: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """As `node.model.passes.OneHead`, without the norm."""
    loss, gradient = loss_and_gradient(hidden, matrix, labels, LOGITS_AT_ONCE, HeadSum(sums, 1.0))
    return loss / len(labels), gradient / len(labels)


def piece_by_piece(hidden: Tensor, matrix: Tensor, labels: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """As it was before."""

    def summed(positions: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(positions, leaf).float(), wanted, reduction="sum")

    leaf, source = matrix.detach().requires_grad_(), hidden.detach().requires_grad_()
    at_once = max(1, LOGITS_AT_ONCE_BEFORE // len(matrix))
    pieces = zip(torch.split(source, at_once), torch.split(labels, at_once), strict=True)
    losses = [checkpoint(summed, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    loss = torch.stack(losses).sum() / len(labels)
    of_hidden, of_matrix = torch.autograd.grad(loss, [source, leaf])
    assert are_finite([of_matrix])
    fold([sums], [of_matrix], len(labels))
    return loss.detach(), of_hidden


JOBS: Final[dict[str, Job]] = {"one pass": in_one_pass, "piece by piece": piece_by_piece}


def head_process(job: str, vocabulary: int, width: int, tokens: int) -> None:
    """Runs one job once and prints what it took, and some of its results."""
    torch.set_num_threads(1)
    numbers = torch.Generator().manual_seed(1)
    matrix = torch.randn(vocabulary, width, generator=numbers).mul_(0.02)
    hidden = torch.randn(tokens, width, generator=numbers)
    labels = torch.randint(0, vocabulary, (tokens,), generator=numbers)
    sums = torch.zeros(vocabulary, width, dtype=torch.float64).fill_(0.0)
    before, begun = _peak_bytes(), time.process_time()
    loss, gradient = JOBS[job](hidden, matrix, labels, sums)
    answer = {"cpu_s": time.process_time() - begun, "mib": (_peak_bytes() - before) / MIB, "loss": loss.item()}
    sampled = torch.cat([gradient.double().flatten()[::SAMPLE], (sums[::SAMPLE] / tokens).flatten()])
    print(json.dumps({**answer, "largest": sampled.abs().max().item(), "sampled": sampled.tolist()[:20000]}))


def _peak_bytes() -> int:
    """Of resident memory, since the process began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def head(vocabulary: int, width: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Both jobs, in turn."""
    found: dict[str, list[dict[str, Any]]] = {job: [] for job in JOBS}
    for _ in range(rounds):
        for job, results in found.items():
            print(f"loss and head: {job}", file=sys.stderr)
            results.append(_run("benchmarks.memory", "--job", job, *map(str, _sizes(vocabulary, width, tokens))))
    one, other = (results[0] for results in found.values())
    off = max(abs(a - b) for a, b in zip(one["sampled"], other["sampled"], strict=True)) / other["largest"]
    arms = {
        job: {key: round(statistics.median(result[key] for result in results), 3) for key in ("cpu_s", "mib")}
        for job, results in found.items()
    }
    new, old = (arms[job] for job in JOBS)
    return {
        "vocabulary": vocabulary,
        "hidden": width,
        "tokens": tokens,
        "rounds": rounds,
        **arms,
        "memory_ratio": round(new["mib"] / old["mib"], 3),
        "time_ratio": round(new["cpu_s"] / old["cpu_s"], 3),
        "gradients_differ": off,
        "losses_differ": abs(one["loss"] - other["loss"]) / other["loss"],
        "least_held_mib": round(math.ceil(LOGITS_AT_ONCE * 4 / MIB), 1),
    }


def _sizes(vocabulary: int, width: int, tokens: int) -> tuple[object, ...]:
    return "--vocabulary", vocabulary, "--hidden", width, "--tokens", tokens


def _run(module: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", module, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def stage() -> dict[str, Any]:
    """Bytes a parameter of a stage peer, bytes of a kept graph, and waits, on the pretend device."""
    print("a stage on the pretend device", file=sys.stderr)
    answer = _run("tests.node.device.every_job")
    waits = {name: sum(by_line.values()) for name, by_line in answer["bfloat16"]["waits"].items()}
    return {
        "bytes_a_parameter": {
            f"{form} moments": {name: round(value, 2) for name, value in found.items()}
            for form, found in answer["bytes"].items()
        },
        "peak_bytes_a_parameter": {
            f"{form} moments": round(max(found.values()), 2) for form, found in answer["bytes"].items()
        },
        "kept_bytes_a_token_block_and_width": {
            f"graphs of {count} of 4 blocks": round(value, 2) for count, value in answer["graph"].items()
        },
        "waits": {
            f"{work} {codec}": waits[f"{work} {codec}"]
            for work in ("FORWARD", "BACKWARD", "loss")
            for codec in ("NONE", "BF16", "INT8", "INT4")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=sorted(JOBS), help="one run of one of them; for the benchmark itself")
    given = parser.parse_args()
    if given.job:
        head_process(given.job, given.vocabulary, given.hidden, given.tokens)
        return
    host = _run("benchmarks.host_memory")
    found = {"stage": stage(), "host": host, "head": head(given.vocabulary, given.hidden, given.tokens, given.rounds)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
