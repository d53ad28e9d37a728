"""Stands in for `python -m node` where only the handling of processes is tested: same arguments, same events, no swarm.

SKIPSTONE_STAND_IN holds words: `crash:N` (stage N fails at once), `deaf:N` (it ignores the end of its input),
`chatter:N` (it writes a line that is no event), `grandchild:N` (it starts a process of its own that it does not end).
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time


def emit(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("target")
    parser.add_argument("--stage", type=int)
    parser.add_argument("--steps", type=int)
    options, _ = parser.parse_known_args()
    words = os.environ.get("SKIPSTONE_STAND_IN", "").split()
    peer, module = f"pid-{os.getpid()}", f"{options.stage}.0"
    if f"crash:{options.stage}" in words:
        print("the cat is on fire", file=sys.stderr)
        return 71
    if f"chatter:{options.stage}" in words:
        print("hello there", flush=True)
    if f"grandchild:{options.stage}" in words:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        emit(event="note", level="info", message=f"grandchild {child.pid}")
    emit(event="node", peer=peer, module=module, state="serving", address="", link="")

    stop = threading.Event()
    if f"deaf:{options.stage}" in words:
        time.sleep(600)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    done = 0
    while not stop.is_set() and not (options.stage == 0 and options.steps is not None and done >= options.steps):
        if options.stage == 0:
            done += 1
            emit(event="step", step=done, loss=5.0 / done, tokens=100 * done, tokens_per_s=10.0, peer=peer)
        stop.wait(0.01)
    counts = {"started": done, "completed": done, "abandoned": 0, "duplicated": 0}
    figures = {"loss_first": None, "loss_last": None, "tokens": 100 * done, "tokens_per_s": 1, "microbatches": counts}
    busy = {"compute": 0, "codec": 0, "wire": 0, "wait": 0}
    emit(event="node_summary", peer=peer, module=module, steps=done, accumulated=done, busy_s=busy, **figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
