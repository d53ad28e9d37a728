"""What training takes of memory: a stage peer on a card, and loss and head of a large vocabulary.

`stage`: bytes a parameter and waits of a bfloat16 run with AdamW on the tests' pretend device, on which every tensor is
metered. `head`: the whole job of a data node in float32 on the CPU, as it is and with all logits at once; each in a
process of its own, with one thread, in turns; the peak is of resident memory above matrix and sums, the time is the
processor's.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks import kit
from benchmarks.kit import tell
from node.model.optimizer import fold
from node.model.passes import LOGITS_AT_ONCE, HeadSum, loss_and_gradient

SAMPLE: Final = 997  # rows of the matrix between two that are compared

# ---- loss and head ---------------------------------------------------------------------------------------------------


def in_one_pass(hidden: Tensor, matrix: Tensor, labels: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Does what `node.model.passes.OneHead` does, without the norm."""
    loss, gradient = loss_and_gradient(hidden, matrix, labels, LOGITS_AT_ONCE, HeadSum(sums, 1.0))
    return loss / len(labels), gradient / len(labels)


def as_a_whole(hidden: Tensor, matrix: Tensor, labels: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """With all logits at once, by autograd."""
    leaf, source = matrix.detach().requires_grad_(), hidden.detach().requires_grad_()
    loss = F.cross_entropy(F.linear(source, leaf), labels)
    of_hidden, of_matrix = torch.autograd.grad(loss, [source, leaf])
    fold([sums], [of_matrix], len(labels))
    return loss.detach(), of_hidden


JOBS: Final = {"one pass": in_one_pass, "as a whole": as_a_whole}


def head_process(connection: Connection, job: str, vocabulary: int, width: int, tokens: int) -> None:
    """Runs one job once and sends what it took, and some of its results."""
    torch.set_num_threads(1)
    numbers = torch.Generator().manual_seed(1)
    matrix = torch.randn(vocabulary, width, generator=numbers).mul_(0.02)
    hidden = torch.randn(tokens, width, generator=numbers)
    labels = torch.randint(0, vocabulary, (tokens,), generator=numbers)
    sums = torch.zeros(vocabulary, width, dtype=torch.float64).fill_(0.0)
    before, begun = peak_mib(), time.process_time()
    loss, gradient = JOBS[job](hidden, matrix, labels, sums)
    answer = {"cpu_s": time.process_time() - begun, "mib": peak_mib() - before, "loss": loss.item()}
    sampled = torch.cat([gradient.double().flatten()[::SAMPLE], (sums[::SAMPLE] / tokens).flatten()])
    connection.send({**answer, "largest": sampled.abs().max().item(), "sampled": sampled.tolist()[:20000]})


def peak_mib() -> float:
    """Peak of resident memory since the process began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def head(options: Any) -> dict[str, Any]:
    """Runs both jobs in turn."""
    sizes = (options.vocabulary, options.hidden, options.tokens)
    found: dict[str, list[dict[str, Any]]] = {job: [] for job in JOBS}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"
    for _ in range(options.rounds):
        for job, results in found.items():
            tell(f"loss and head: {job}")
            with kit.process(head_process, job, *sizes) as child:
                results.append(kit.hear(child, 3600))
    one, other = (results[0] for results in found.values())
    off = max(abs(a - b) for a, b in zip(one["sampled"], other["sampled"], strict=True)) / other["largest"]
    arms = {job: kit.medians(results, ("cpu_s", "mib")) for job, results in found.items()}
    new, old = (arms[job] for job in JOBS)
    return {
        **dict(zip(("vocabulary", "hidden", "tokens"), sizes, strict=True)),
        **arms,
        "memory_ratio": round(new["mib"] / old["mib"], 3),
        "time_ratio": round(new["cpu_s"] / old["cpu_s"], 3),
        "gradients_differ": off,
        "losses_differ": abs(one["loss"] - other["loss"]) / other["loss"],
        "least_held_mib": round(math.ceil(LOGITS_AT_ONCE * 4 / 2**20), 1),
    }


# ---- a stage on a card -----------------------------------------------------------------------------------------------


def stage(options: Any) -> dict[str, Any]:
    """Bytes a parameter of a stage peer, bytes of a kept graph, and waits, on the pretend device."""
    tell("a stage on the pretend device")
    command = [sys.executable, "-m", "tests.node.device.every_job"]
    ran = subprocess.run(command, cwd=kit.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(ran.stdout.splitlines()[-1])
    waits = {name: sum(by_line.values()) for name, by_line in answer["bfloat16"]["waits"].items()}
    return {
        "bytes_a_parameter": answer["bytes"],
        "peak_bytes_a_parameter": {form: max(found.values()) for form, found in answer["bytes"].items()},
        "kept_bytes_a_token_block_and_width": answer["graph"],
        "waits": {name: count for name, count in waits.items() if name.startswith(("FORWARD ", "BACKWARD ", "loss "))},
    }


if __name__ == "__main__":
    usual = {"vocabulary": 131072, "hidden": 1024, "tokens": 1024, "rounds": 3}
    quick = {"vocabulary": 4096, "hidden": 64, "tokens": 256, "rounds": 1, "parts": ["head"]}
    kit.run(__doc__, {"stage": stage, "head": head}, quick, **usual)
