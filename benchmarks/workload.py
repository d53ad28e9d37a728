"""What whole documents in microbatches of equal cost are worth.

    python benchmarks/workload.py [--parts stage devices loss bound swarm] [--seeds 1 2 3] [--rounds 3]
        [--microbatches 8] [--staleness 0] [--replicas 1] [--quick]

`stage` (`benchmarks/workload_stage.py`): time a token of a real stage, and the cost model's error. `devices`
(`benchmarks/workload_devices.py`): a microbatch on two devices of one node. `loss` (`benchmarks/workload_loss.py`):
held-out loss at equal tokens against concatenation. `swarm` (`benchmarks/workload_swarm.py`): tokens per second of a
swarm of two hops against concatenation with a mask and today's rows; `bound` (`benchmarks/workload_bound.py`): what
could be had there at best. `--quick` is for tests: tiny sizes.

Prints one JSON object; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import workload_bound, workload_devices, workload_loss, workload_stage, workload_swarm

PARTS = ("stage", "devices", "loss", "bound", "swarm")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3, help="of the swarms")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step of the swarms")
    parser.add_argument("--staleness", type=int, default=0, help="of the swarms")
    parser.add_argument("--replicas", type=int, default=1, help="of a stage of the swarms; more are emulated")
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(words)


def main() -> None:
    options = parsed()
    found: dict[str, Any] = {"benchmark": "workload"}
    if "stage" in options.parts:
        sizes = workload_stage.Sizes(16, 64, 2, 2, 20) if options.quick else workload_stage.Sizes()
        found["stage"] = workload_stage.measure_stage(sizes, tell)
    if "devices" in options.parts:
        dealt = workload_devices.Sizes(16, 1024, 2, 4, 1) if options.quick else workload_devices.Sizes()
        found["devices"] = workload_devices.measure_devices(dealt, tell)
    if "loss" in options.parts:
        task = workload_loss.QUICK if options.quick else workload_loss.TASK
        found["loss"] = workload_loss.measure_loss(task, options.seeds, tell)
    if "bound" in options.parts:
        found["bound"] = workload_bound.measure_bound(tell)
    if "swarm" in options.parts:
        swarm = (
            workload_swarm.Sizes(16, 64, 2, 2, 2, 1, 0, 200)
            if options.quick
            else workload_swarm.Sizes(
                microbatches=options.microbatches,
                rounds=options.rounds,
                staleness=options.staleness,
                replicas=options.replicas,
            )
        )
        found["swarm"] = workload_swarm.measure_swarm(swarm, tell)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
