"""What training takes of memory: a stage peer on a card, rounds and checkpoints on the host, loss and head of a large
vocabulary.

`stage`: bytes a parameter and waits of a bfloat16 run with AdamW on the tests' pretend device, on which every tensor is
metered. `host`: bytes a parameter that numpy allocates (by `tracemalloc`) for replicas that average in one process,
between two rounds and at most in one, and what the write of a checkpoint adds. `head`: the whole job of a data node in
float32 on the CPU, as it is and with the logits computed again piece by piece in the backward pass; each in a process
of its own, with one thread, in turns; the peak is of resident memory above matrix and sums, the time is the
processor's.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks import kit
from benchmarks.kit import RUN, tell
from node.averaging.anchor.anchor_store import AnchorStore
from node.averaging.anchor.lone_replica import anchor_of
from node.averaging.anchor.module_vector import LocalReplica
from node.checkpoint.folder import CheckpointFolder, save_state
from node.checkpoint.replica import capture_as_written
from node.checkpoint.state import Agreed, ReplicaState
from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.head_loss import HeadSum, loss_and_gradient
from node.model.optimizer import Accumulator, InnerOptimizer, are_finite, fold
from node.model.parts import LOGITS_AT_ONCE
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId
from tests.node.averaging.small_rounds import Blocks, hall
from tests.node.small_manifest import small_manifest

LOGITS_AT_ONCE_BEFORE: Final = 2**24


MIB: Final = 2**20


SAMPLE: Final = 997
"""Rows of the matrix between two that are compared."""


REPLICAS: Final = 2


FRAGMENTS: Final = 8


ELEMENTS: Final = 2**22


CHECKPOINT_ELEMENTS: Final = 48 * 10**6
"""Enough that the share which waits for the disk exceeds the least allowance."""


PEER: Final = PeerId("benchmark")


# ---- loss and head ---------------------------------------------------------------------------------------------------


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


def head_process(connection: Connection, job: str, vocabulary: int, width: int, tokens: int) -> None:
    """Runs one job once and sends what it took, and some of its results."""
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
    connection.send({**answer, "largest": sampled.abs().max().item(), "sampled": sampled.tolist()[:20000]})


def _peak_bytes() -> int:
    """Of resident memory, since the process began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def head(sizes: tuple[int, int, int], rounds: int) -> dict[str, Any]:
    """Both jobs, in turn."""
    found: dict[str, list[dict[str, Any]]] = {job: [] for job in JOBS}
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"
    for _ in range(rounds):
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
        "least_held_mib": round(math.ceil(LOGITS_AT_ONCE * 4 / MIB), 1),
    }


# ---- host ------------------------------------------------------------------------------------------------------------


def _held(since: int, parameters: int) -> float:
    gc.collect()
    return round((tracemalloc.get_traced_memory()[0] - since) / parameters, 2)


async def rounds(fragments: int, elements: int = ELEMENTS) -> dict[str, float]:
    """Bytes a parameter and replica, after two turns of all fragments: at rest, and at most in a round."""
    gc.collect()
    since = tracemalloc.get_traced_memory()[0]
    async with hall(REPLICAS, elements=elements, inner_steps=fragments, fragments=fragments) as here:
        for number in range(1, 2 * fragments + 1):
            tell(f"round {number} of {2 * fragments}")
            tracemalloc.reset_peak()
            await here.a_round(number, 1)
        await asyncio.sleep(0)
        peak = (tracemalloc.get_traced_memory()[1] - since) / (REPLICAS * elements)
        return {"steady": _held(since, REPLICAS * elements), "peak": round(peak, 2)}


def a_checkpoint(elements: int = CHECKPOINT_ELEMENTS) -> dict[str, float]:
    """Bytes a parameter that the write of a checkpoint takes at most, and the bytes that it wrote."""
    part = Blocks(elements, FRAGMENTS)
    total = Accumulator(part)
    optimizer = InnerOptimizer(small_manifest().training, [total])

    def step(number: int) -> None:
        total.add(MicrobatchId(PEER, number), 32, [torch.full_like(p, 1e-3).detach() for p in total.parameters])
        optimizer.step()

    step(0)
    store = AnchorStore(anchor_of(LocalReplica([part], FRAGMENTS, optimizer)))
    with ComputeThread() as compute, tempfile.TemporaryDirectory() as path:
        post, states = partial(compute.post, Priority.UPKEEP), list[ReplicaState]()
        tracemalloc.reset_peak()
        since = tracemalloc.get_traced_memory()[0]
        agreed = Agreed(store.saved(), 1, 32)
        capture = partial(capture_as_written, (part,), optimizer, post, visits=1, tokens=32, agreed=agreed)
        post(lambda: states.append(capture())).result()
        stepping = post(lambda: step(1))
        header = save_state(CheckpointFolder(Path(path), RUN, b""), PEER, ModuleId(1), states.pop())
        stepping.result()
        peak = tracemalloc.get_traced_memory()[1] - since
        return {"peak": round(peak / elements, 2), "written": round(header.file.size / elements, 2)}


def host_process(connection: Connection, elements: int, checkpoint_elements: int) -> None:
    tracemalloc.start(1)
    found = {f"{fragments} fragments": asyncio.run(rounds(fragments, elements)) for fragments in (1, FRAGMENTS)}
    connection.send({**found, "a checkpoint adds": a_checkpoint(checkpoint_elements)})


# ---- all -------------------------------------------------------------------------------------------------------------


def stage() -> dict[str, Any]:
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


def measure(options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "stage" in options.parts:
        found["stage"] = stage()
    if "host" in options.parts:
        with kit.process(host_process, options.elements, options.checkpoint_elements) as host:
            found["host"] = kit.hear(host, 3600)
    if "head" in options.parts:
        found["head"] = head((options.vocabulary, options.hidden, options.tokens), options.rounds)
    return found


def main() -> None:
    usual = {"vocabulary": 131072, "hidden": 1024, "tokens": 1024, "rounds": 3}
    sizes = {"elements": ELEMENTS, "checkpoint_elements": CHECKPOINT_ELEMENTS}
    quick = {"vocabulary": 4096, "hidden": 64, "tokens": 256, "rounds": 1, "elements": 2**16}
    quick |= {"checkpoint_elements": 2**16, "parts": ["host", "head"]}
    kit.run(__doc__, measure, quick, parts=("stage", "host", "head"), **usual, **sizes)


if __name__ == "__main__":
    main()
