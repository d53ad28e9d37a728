"""Several devices in one node: whole documents dealt, all documents cut, and the node's choice between and beyond them.

A module of one block, forward and backward, on two processor cores with a thread each, arms in turns for each
microbatch, each of them first in its turn; medians of the repeats, and of the ratios within a repeat. Microbatches are
packed of log-normal documents as a data node packs them, some are of few long ones. `one` is a single thread; `whole`
cuts no document; `cut` cuts them all (the paper's sharding by document); `ours` chooses.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import workload_stage
from benchmarks.packing import Task, log_normal, ours
from node.concurrency.device_threads import DeviceThreads
from node.model.parts import build_block_stack
from node.model.passes import OneDevice, Passes
from node.pipeline.several_devices import Copies, SeveralDevices
from protocol.manifest.model import quadratic_share
from swarm.vocabulary.types import ModuleId
from swarm.workload.device_shares import deal, deal_cut, deal_whole

BAR_DEALT: Final = 1.02
BAR_CHOICE: Final = 1.05
BAR_GRADIENTS: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int = 64
    sequence: int = 8192
    rows: int = 4
    microbatches: int = 12
    repeats: int = 5
    devices: int = 2


def measure_devices(sizes: Sizes, tell: Callable[[str], None]) -> dict[str, Any]:
    cores = torch.get_num_threads()
    devices = [torch.device("cpu")] * sizes.devices
    torch.set_num_threads(sizes.devices)
    with DeviceThreads(devices) as threads:
        threads.set_up()
        found = _measured(sizes, threads, tell)
    torch.set_num_threads(cores)
    return found


def _measured(sizes: Sizes, threads: DeviceThreads, tell: Callable[[str], None]) -> dict[str, Any]:
    manifest = workload_stage.manifest_of(workload_stage.Sizes(sizes.hidden, sizes.sequence, sizes.rows))
    part, share = build_block_stack(manifest, ModuleId(1)), quadratic_share(manifest.model)
    copies = Copies(part, threads)
    arms: dict[str, Passes] = {
        "one": OneDevice(part),
        "whole": SeveralDevices(copies, threads, share, lambda costs, count, _: deal_whole(costs, count)),
        "cut": SeveralDevices(copies, threads, share, lambda costs, count, _: deal_cut(costs, count)),
        "ours": SeveralDevices(copies, threads, share),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    uneven, over, difference, cuts = list[float](), list[float](), 0.0, 0
    for number, documents in enumerate(_microbatches(sizes, manifest.microbatch_tokens, share)):
        hidden = torch.randn(1, sum(documents), sizes.hidden, generator=torch.Generator().manual_seed(number))
        samples: dict[str, list[float]] = {name: [] for name in arms}
        for repeat in range(1 + sizes.repeats):
            for name in (*arms, *arms)[repeat % len(arms) :][: len(arms)]:
                taken_s = _visit_s(arms[name], hidden, documents)
                if repeat:
                    samples[name].append(taken_s)
        for name, of in samples.items():
            seconds[name].append(statistics.median(of))
        better = min(("whole", "cut"), key=lambda name: seconds[name][-1])
        over.append(statistics.median(a / b for a, b in zip(samples["ours"], samples[better], strict=True)))
        dealt = deal([length + share * length**2 for length in documents], sizes.devices).value
        uneven.append(dealt.unevenness)
        cuts += bool(dealt.cut)
        difference = max(difference, _difference(arms["ours"], arms["one"], hidden, documents))
        shown = ", ".join(f"{name} {1e3 * of[-1]:.0f} ms" for name, of in seconds.items())
        tell(f"devices, {len(documents)} documents, {len(dealt.cut)} cut: {shown}")
    better_s = sum(map(min, seconds["whole"], seconds["cut"]))
    return {
        "seconds": {name: round(sum(of), 3) for name, of in seconds.items()},
        "dealt_max_over_mean": round(max(uneven), 4),
        "microbatches_with_cuts": cuts,
        "choice_over_better": {
            "median": round(statistics.median(over), 3),
            "all": round(sum(seconds["ours"]) / better_s, 3),
        },
        "one_over_ours": round(sum(seconds["one"]) / sum(seconds["ours"]), 3),
        "gradients_differ": difference,
        "bars": {"dealt": BAR_DEALT, "choice": BAR_CHOICE, "gradients": BAR_GRADIENTS},
    }


def _microbatches(sizes: Sizes, tokens: int, share: float) -> list[tuple[int, ...]]:
    """Half as a data node packs them, half of few long documents."""
    half, longest = sizes.microbatches // 2, sizes.sequence
    packed = ours(Task(log_normal(), longest, tokens, share, half)).packed
    shapes = [(longest,), (longest, longest // 2), (longest, longest - 1, longest - 2), (longest, longest // 8)]
    return [one.documents for one in packed[:half]] + [shapes[number % len(shapes)] for number in range(half)]


def _visit_s(passes: Passes, hidden: Tensor, documents: tuple[int, ...]) -> float:
    begun = time.perf_counter()
    visit = passes.forward(hidden, documents)
    passes.backward(visit, torch.ones_like(visit.result))
    return time.perf_counter() - begun


def _difference(ours: Passes, one: Passes, hidden: Tensor, documents: tuple[int, ...]) -> float:
    """The largest difference of a parameter's gradients, as a part of its largest gradient."""
    found = []
    for passes in (ours, one):
        visit = passes.forward(hidden, documents)
        found.append(passes.backward(visit, torch.ones_like(visit.result)).parameters)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*found, strict=True))
