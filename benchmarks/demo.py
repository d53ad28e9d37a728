"""What a newcomer sees of `make swarm`: seconds to the first line, to the first step, and until the loss is under 3
nats a byte.

Runs `skipstone up` as it comes, in a process of its own, and stops it once the loss has stayed under 3 for ten steps,
or `--limit` seconds after the first step.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import ROOT

STEADY_STEPS = 10
WANTED_LOSS = 3.0


def measure(options: Any) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began, first_line_s = time.perf_counter(), None
    steps, summary = list[tuple[float, dict[str, float]]](), dict[str, Any]()
    command = [sys.executable, "-P", "-m", "skipstone", "up", "--json"]
    # The first line of `--json` goes to standard error: both streams are one.
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **streams) as swarm:
        for line in swarm.stdout or ():
            now = time.perf_counter() - began
            first_line_s = now if first_line_s is None else first_line_s
            event = json.loads(line) if line.startswith("{") else {}
            summary = event if event.get("event") == "summary" else summary
            if event.get("event") != "step":
                continue
            steps.append((now, event))
            latest = [step["loss"] for _, step in steps[-STEADY_STEPS:]]
            if now > steps[0][0] + options.limit or (len(latest) == STEADY_STEPS and max(latest) < WANTED_LOSS):
                swarm.send_signal(signal.SIGINT)
    below = [at for at, step in steps if step["loss"] < WANTED_LOSS]
    return {
        "first_line_s": first_line_s,
        "first_step_s": steps[0][0],
        "loss_first": steps[0][1]["loss"],
        "loss_last_10": statistics.mean(step["loss"] for _, step in steps[-STEADY_STEPS:]),
        "under_3_s": below[0] if below else None,
        "steps": len(steps),
        "seconds": steps[-1][0],
        "tokens_per_s": steps[-1][1]["tokens_per_s"],
        "peers": len(summary.get("peers", ())),
        "microbatches": summary.get("microbatches"),
    }


if __name__ == "__main__":
    kit.run(__doc__, measure, {"limit": 30.0}, limit=180.0)
