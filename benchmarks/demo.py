"""What a newcomer sees of `make swarm`: seconds to the first line, to the first step, and until the loss is under 3
nats a byte.

    python benchmarks/demo.py [--limit SECONDS]

Runs `skipstone up` as it comes, in a process of its own, and stops it once the loss has stayed under 3 for ten steps.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

STEADY_STEPS = 10
WANTED_LOSS = 3.0


def main() -> None:
    """Follows the events of one swarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which the swarm is stopped")
    limit = parser.parse_args().limit
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    began = time.perf_counter()
    # Both streams are one, because the first line of `--json` goes to standard error.
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "node", "up", "--json"],
        env=environment,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as swarm:
        assert swarm.stdout is not None
        first_line_s: float | None = None
        steps: list[tuple[float, dict[str, float]]] = []
        summary: dict[str, object] = {}
        for line in swarm.stdout:
            now = time.perf_counter() - began
            first_line_s = now if first_line_s is None else first_line_s
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("event") == "summary":
                summary = event
            if event.get("event") != "step":
                continue
            steps.append((now, event))
            latest = [step["loss"] for _, step in steps[-STEADY_STEPS:]]
            if now > limit or (len(latest) == STEADY_STEPS and max(latest) < WANTED_LOSS):
                swarm.send_signal(signal.SIGINT)
    print(json.dumps(_report(first_line_s, steps, summary)))


def _report(
    first_line_s: float | None, steps: list[tuple[float, dict[str, float]]], summary: dict[str, object]
) -> dict[str, object]:
    below = [at for at, step in steps if step["loss"] < WANTED_LOSS]
    peers = summary.get("peers")
    return {
        "first_line_s": first_line_s,
        "first_step_s": steps[0][0],
        "loss_first": steps[0][1]["loss"],
        "loss_last_10": statistics.mean(step["loss"] for _, step in steps[-STEADY_STEPS:]),
        "under_3_s": below[0] if below else None,
        "steps": len(steps),
        "seconds": steps[-1][0],
        "tokens_per_s": steps[-1][1]["tokens_per_s"],
        "peers": len(peers) if isinstance(peers, list) else None,
        "microbatches": summary.get("microbatches"),
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
