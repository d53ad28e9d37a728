"""Experts against one dense path on domains of real text: held-out nats a byte, all arms in one run.

    python benchmarks/experts.py [--domains FILE..] [--hidden 16] [--steps 1500] [--seeds 1 2 3] [--json]

Arms: a dense path at equal steps (steps of one microbatch: what the papers compare with), a dense path at equal steps
and tokens, 2x2 experts with a fitted router, the same experts with documents dealt by chance; with --all also 3x3 with
all and with half of the text. The first `--prefix` bytes of each document, by
which routes are chosen, are left out of all losses, the dense arms' too. Routed models are also measured with the route
chosen anew every 64 and 256 bytes. Of each file the first 1.1 MB count. Documents are pieces of 16 KiB, or shorter
where those would be fewer than 128; a domain takes 64 KiB at least.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.experts_task import (
    ARMS,
    HELD_OUT,
    MORE_ARMS,
    Arm,
    Domain,
    documents_of,
    domains_of,
    routed_manifest,
)
from node.data.documents import Documents, Place, is_held_out
from node.data.feed import held_out_microbatches
from node.data.packing import Microbatch
from node.experts.router import Router
from node.model.device import flushed_denormals
from node.solo.trainer import SoloTrainer, WholeModel, evaluate
from protocol.manifest.manifest import Manifest
from swarm.experts.routes import best_route
from swarm.vocabulary.errors import SkipstoneError

CPU: Final = torch.device("cpu")
EVERY: Final = (64, 256)
CURVE_POINTS: Final = 6
ALL: Final = 10**6
BARS: Final = {
    "routed/dense_steps": -0.08,
    "routed/dense_tokens": -0.015,
    "random/routed": 0.03,
}
"""Of perplexity: at most, at most, at least."""


def main() -> None:
    try:
        report_on(_arguments())
    except SkipstoneError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def report_on(arguments: argparse.Namespace) -> None:
    """Measures the arms that are asked for, and prints the report."""
    torch.set_num_threads(1)
    domains = domains_of(arguments.domains)
    arms = ARMS | (MORE_ARMS if arguments.all else {})
    if arguments.arms:
        arms = {name: arms[name] for name in arguments.arms}
    report = measure(domains, arms, arguments)
    if not arguments.json:
        print(json.dumps(report, indent=2))
    print(json.dumps(report))


def measure(domains: Sequence[Domain], arms: dict[str, Arm], arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for seed in arguments.seeds:
        for name, arm in arms.items():
            began = time.process_time()
            found[name].append(run(arm, domains, arguments, seed))
            spent = time.process_time() - began
            print(
                f"seed {seed}, {name}: {found[name][-1]['loss']:.4f} ({spent:.0f} CPU s)", file=sys.stderr, flush=True
            )
    loss = {name: statistics.median(each["loss"] for each in of) for name, of in found.items()}
    return {
        "domains": {domain.name: len(domain.text) for domain in domains},
        "hidden": arguments.hidden,
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "prefix": arguments.prefix,
        "perplexity": {
            name: {
                "change": round(math.exp(_median_of_differences(found, *name.split("/"))) - 1, 4),
                "bar": bar,
            }
            for name, bar in BARS.items()
            if found.keys() >= set(name.split("/"))
        },
        "every_seed": {name: [each | {"loss": round(each["loss"], 4)} for each in of] for name, of in found.items()},
        "arms": {name: {"loss": round(of, 4)} for name, of in loss.items()},
    }


def run(arm: Arm, domains: Sequence[Domain], arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Trains one arm; its held-out loss in nats a byte, and how it came down."""
    hidden, steps, prefix = arguments.hidden, arguments.steps, arguments.prefix
    manifest, router = routed_manifest(arm, domains, hidden, steps, seed, prefix, arguments.restarts)
    documents = documents_of(domains, seed, arm.text, manifest, router)
    # Of all the text, whatever share of it there is to train on: all arms are measured on the same.
    measured = documents_of(domains, seed, 1.0, manifest, router)
    texts = list(held_out_microbatches(manifest, ALL, measured, prefix))
    with flushed_denormals():
        model = WholeModel(manifest, CPU)
        trainer = SoloTrainer(manifest, model, documents)
        curve = []
        while trainer.steps < steps:
            trainer.step(lambda: False)
            if trainer.steps % max(1, steps // CURVE_POINTS) == 0 and trainer.steps < steps:
                some = texts[:: max(1, len(texts) // 50)]
                curve.append([trainer.steps, round(evaluate(model, some)["loss"], 4)])
        result = evaluate(model, texts)
        report = {"loss": result["loss"], "curve": curve, "tokens": trainer.tokens}
        if "routes" in result:
            report["routes"] = {name: [round(of["loss"], 4), of["tokens"]] for name, of in result["routes"].items()}
        if router is not None:
            report["again_every"] = rerouted(model, manifest, router, measured, seed)
            report["router_us"] = routing_us(router, measured)
    return report


def routing_us(router: Router, documents: Documents) -> float:
    """Microseconds that the choice of a document's route takes this thread, median of all documents."""
    taken = []
    for fragment in documents.epoch(Place(), lambda name: True):
        began = time.thread_time_ns()
        best_route(router.affinity(fragment.name, fragment.opening))
        taken.append((time.thread_time_ns() - began) / 1000)
    return round(statistics.median(taken), 1)


def rerouted(
    model: WholeModel, manifest: Manifest, router: Router, documents: Documents, seed: int
) -> dict[str, float]:
    """Nats a byte when the route is chosen once by the first bytes, or again every so many by the last ones."""
    names = {str(every): every for every in EVERY}
    sums, tokens = dict.fromkeys(["once", *names], 0.0), 0
    for fragment in documents.epoch(Place(), lambda name: is_held_out(seed, name, HELD_OUT)):
        text, prefix = fragment.tokens, manifest.route_prefix
        if text.size <= prefix:
            continue
        once = best_route(router.affinity(fragment.name, fragment.opening))
        losses = _losses_on_all_routes(model, manifest, text)
        sums["once"] += float(losses[once][prefix:].sum())
        tokens += text.size - prefix
        for name, every in names.items():
            for at in range(prefix, text.size, every):
                route = best_route(router.affinity("", text[max(0, at - prefix) : at]))
                sums[name] += float(losses[route][at : at + every].sum())
    return {name: round(total / tokens, 4) for name, total in sums.items()}


def _losses_on_all_routes(
    model: WholeModel, manifest: Manifest, text: np.ndarray[Any, np.dtype[np.int64]]
) -> dict[tuple[int, ...], np.ndarray[Any, np.dtype[np.float32]]]:
    """Of each byte of a document, cut into pieces as in training."""
    most = manifest.model.sequence - manifest.model.sequence // 64
    pieces = [min(most, text.size - at) for at in range(0, text.size, most)]
    labels = torch.from_numpy(text).unsqueeze(0)
    microbatch = Microbatch(labels.roll(1, 1), labels, 0.0, documents=tuple(pieces))
    routes = product(*(range(experts) for experts in manifest.stages.experts_of_each[1:]))
    return {route: model.token_losses(replace(microbatch, route=route))[0].numpy() for route in routes}


def _median_of_differences(found: dict[str, list[dict[str, Any]]], one: str, other: str) -> float:
    pairs = zip(found[one], found[other], strict=True)
    return statistics.median(float(a["loss"]) - float(b["loss"]) for a, b in pairs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--domains", type=Path, nargs="+", default=[], help="files or folders, a domain each")
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--prefix", type=int, default=256)
    parser.add_argument("--restarts", type=int, default=8, help="beginnings of the router's fit")
    parser.add_argument("--all", action="store_true", help="3x3 experts too, with all and half of the text")
    parser.add_argument("--arms", nargs="+", default=[], help="only these")
    parser.add_argument("--json", action="store_true", help="nothing but the one line of JSON on standard output")
    return parser.parse_args()


if __name__ == "__main__":
    main()
