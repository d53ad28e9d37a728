"""What training takes of memory: a stage peer on a card, loss and head of a large vocabulary, and a node by process.

`stage`: bytes a parameter and waits of a bfloat16 run with AdamW on the tests' pretend device, on which every tensor is
metered. `head`: the whole job of a data node in float32 on the CPU, as it is and with all logits at once; each in a
process of its own, with one thread, in turns; the peak is of resident memory above matrix and sums, the time is the
processor's. `node`: processor seconds of `--help`, and of a stage peer that `join` starts until its first inner step;
and the memory of its processes after some steps.
"""

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
from lab.emulation.proxy import descendants
from node.doctor.examination import OVERHEAD_MIB
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, node_command
from node.model.optimizer import fold
from node.model.passes import LOGITS_AT_ONCE, HeadSum, loss_and_gradient
from node.observability.events import InnerStep

SAMPLE: Final = 997  # rows of the matrix between two that are compared
TARGETS: Final = {"help_cpu_s": 0.4, "join_cpu_s": 3.0, "overhead_mib": OVERHEAD_MIB}


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


def stage(options: Any) -> dict[str, Any]:
    """Bytes a parameter of a stage peer, bytes of a kept graph, and waits, on the pretend device."""
    tell("a stage on the pretend device")
    answer = json.loads(ran("-m", "tests.node.device.every_job")[1].splitlines()[-1])
    waits = {name: sum(by_line.values()) for name, by_line in answer["bfloat16"]["waits"].items()}
    return {
        "bytes_a_parameter": answer["bytes"],
        "peak_bytes_a_parameter": {form: max(found.values()) for form, found in answer["bytes"].items()},
        "kept_bytes_a_token_block_and_width": answer["graph"],
        "waits": {name: count for name, count in waits.items() if name.startswith(("FORWARD ", "BACKWARD ", "loss "))},
    }


def ran(*words: str) -> tuple[float, str]:
    """Processor seconds and output of a Python command."""
    before = os.times()
    done = subprocess.run([sys.executable, *words], cwd=kit.ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return round(sum(os.times()[2:4]) - sum(before[2:4]), 2), done.stdout


def mib(rollup: str, field: str = "Anonymous") -> float:
    """A field of /proc/PID/smaps_rollup. `Anonymous` memory is shared with no process, and cannot be dropped."""
    return round(next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith(f"{field}:")) / 1024, 1)


async def node(options: Any) -> dict[str, Any]:
    """A data node and a stage peer that start as `join` does; the figures are the stage peer's."""
    show = "import {}; print(open('/proc/self/smaps_rollup').read())"
    torch_mib, both_mib = (mib(ran("-c", show.format(name))[1]) for name in ("torch", "node.runtime.node"))
    found: dict[str, Any] = {"help_cpu_s": ran("-m", "skipstone", "--help")[0], "targets": TARGETS}
    sizes = {"hidden": 256, "feed_forward": 688, "sequence": 128, "rows": 4, "microbatches": 8}
    manifest, pair = kit.run_of("memory", [0, 2], **sizes), LocalSwarmOptions(peers=2, threads=1)
    async with LocalSwarm(manifest, pair, command=node_command()) as swarm:
        async for event in swarm.events():
            if not isinstance(event, InnerStep) or event.module != "1.0" or event.step not in (1, options.steps):
                continue
            folders = [Path(f"/proc/{pid}") for pid in sorted(pid for _, pid in descendants({swarm.processes()[1]}))]
            if event.step == 1:
                times = [(folder / "stat").read_text().rpartition(")")[2].split()[11:13] for folder in folders]
                found["join_cpu_s"] = sum(int(user) + int(system) for user, system in times) / os.sysconf("SC_CLK_TCK")
            else:
                texts = [(folder / "smaps_rollup").read_text() for folder in folders]  # in the order of their start
                found["private_mib"], *children = map(mib, texts)
                found["pss_mib"] = [mib(text, "Pss") for text in texts]
                beside = (torch_mib, round(both_mib - torch_mib, 1), *children)
                found["overhead_mib"] = dict(zip(OVERHEAD_MIB, beside, strict=True))
                swarm.request_stop()
    return found


if __name__ == "__main__":
    usual = {"vocabulary": 131072, "hidden": 1024, "tokens": 1024, "rounds": 3, "steps": 30}
    quick = {"vocabulary": 4096, "hidden": 64, "tokens": 256, "rounds": 1, "steps": 3, "parts": ["head", "node"]}
    kit.run(__doc__, {"stage": stage, "head": head, "node": node}, quick, **usual)
