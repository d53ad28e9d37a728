"""A swarm under churn: peers are killed and join at random for minutes, and afterwards all counts have to add up.

A peer is killed with SIGKILL every `--every` seconds on average and another one joins as often; a module's last replica
is spared. Then the same run is trained undisturbed for the same tokens. Figures: held-out losses, the verdict of
`skipstone check` on the event logs, the longest time without a step while every module was served, and how memory and
open files of the longest-lived nodes grew. `--keep` is a folder for the event logs.
"""

import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import ROOT, demo_run, median, tell, verdict
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import CaughtUp, RoundCommitted
from protocol.manifest.manifest import Manifest

SAMPLE_S = 5.0
SETTLING_S = 90.0  # imports, first buffers, first rounds: memory is not compared before
LONG_LIFE_S = 180.0
EVALUATED = 32


def soak_run(seed: int) -> Manifest:
    """The demo model in four stages; rounds are frequent, so that churn affects many of them."""
    inner = {"staleness": 1, "inner_steps": 10, "outer": {"learning_rate": 0.7, "momentum": 0.5}}
    return demo_run("soak", [0, 1, 1, 2], seed=seed, **inner)


@dataclass(slots=True)
class Life:
    """Samples of one node's process: time in seconds, resident MiB, open files."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)

    def sample(self, pid: int, now: float) -> None:
        with contextlib.suppress(OSError, StopIteration):  # it may end while it is looked at
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            resident = next(line for line in status if line.startswith("VmRSS"))
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self.samples.append((now, int(resident.split()[1]) / 1024, files))

    def growth(self) -> tuple[float, float] | None:
        """Growth of memory and of open files: medians of the last third over the first. None for a short life."""
        settled = [sample for sample in self.samples if sample[0] - self.samples[0][0] > SETTLING_S]
        if len(settled) < 6 or settled[-1][0] - settled[0][0] < LONG_LIFE_S:
            return None
        third = len(settled) // 3
        first, last = settled[:third], settled[-third:]

        def ratio(column: int) -> float:
            return statistics.median(s[column] for s in last) / statistics.median(s[column] for s in first)

        return ratio(1), ratio(2)


@dataclass(slots=True)
class Account:
    """Figures of one swarm."""

    rounds: int = 0
    caught_up: int = 0
    killed: int = 0
    joined: int = 0
    longest_pause_s: float = 0.0  # without a completed microbatch while every module was served
    lives: dict[int, Life] = field(default_factory=dict)
    tokens: int = 0
    loss: float = 0.0
    failures: dict[int, int] = field(default_factory=dict)
    check: dict[str, object] = field(default_factory=dict)

    def growth(self) -> dict[str, object]:
        """Growth of memory and open files of the nodes that lived long."""
        lives = [ratios for life in self.lives.values() if (ratios := life.growth()) is not None]
        table: dict[str, object] = {"long_lives": len(lives)}
        for name, ratios in (("memory", [life[0] for life in lives]), ("open_files", [life[1] for life in lives])):
            table[name] = {"median": median(ratios), "largest": max(ratios, default=None)}
        return table


class Soak:
    """Watches one swarm; kills and starts nodes if asked."""

    def __init__(self, swarm: LocalSwarm, stages: int, randomness: random.Random) -> None:
        self.account, self.victims = Account(), set[int]()
        self._swarm, self._stages, self._random = swarm, stages, randomness

    async def run(self, *, every_s: float | None, until_s: float = float("inf"), tokens: int | None = None) -> None:
        """Runs for a time or a number of tokens. `every_s`: mean time between two kills, and between two joins."""
        tasks = [asyncio.create_task(part) for part in (self._watch(), self._sample())]
        if every_s is not None:
            tasks += [asyncio.create_task(part) for part in (self._kill(every_s), self._join(every_s))]
        begun = last_step = time.monotonic()
        trained = shown_s = 0
        try:
            while time.monotonic() - begun < until_s and (tokens is None or trained < tokens):
                await asyncio.sleep(0.5)
                now = time.monotonic()
                if self._swarm.progress.tokens > trained or not all(self._serving().values()):
                    last_step, trained = now, self._swarm.progress.tokens
                self.account.longest_pause_s = max(self.account.longest_pause_s, now - last_step)
                if now - begun - shown_s > 30:
                    shown_s = int(now - begun)
                    tell(f"{shown_s} s: {trained} tokens, {self.account.rounds} commits")
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def failures(self) -> dict[int, int]:
        """Exit codes other than 0 of the nodes that we did not kill."""
        return {i: end.exit_code for i, end in self._swarm.ends.items() if end.exit_code and i not in self.victims}

    async def _watch(self) -> None:
        async for event in self._swarm.events():
            self.account.rounds += isinstance(event, RoundCommitted)
            self.account.caught_up += isinstance(event, CaughtUp)

    def _serving(self) -> dict[int, list[int]]:
        """The live, serving nodes of each stage."""
        found: dict[int, list[int]] = {stage: [] for stage in range(self._stages)}
        for index, peer in self._swarm.progress.peers.items():
            if peer.exit_code is None and peer.state == "serving":
                found[peer.stage].append(index)
        return found

    async def _kill(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / every_s))
            spare = [index for replicas in self._serving().values() if len(replicas) > 1 for index in replicas]
            if spare:
                victim = self._random.choice(spare)
                self.victims.add(victim)
                self._swarm.kill(victim)
                self.account.killed += 1

    async def _join(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(1 / every_s))
            live = [peer.stage for peer in self._swarm.progress.peers.values() if peer.exit_code is None]
            stages = range(self._stages)
            self._swarm.start_peer(min(stages, key=lambda stage: (live.count(stage), self._random.random())))
            self.account.joined += 1

    async def _sample(self) -> None:
        while True:
            now = time.monotonic()
            for index, pid in self._swarm.processes().items():
                self.account.lives.setdefault(index, Life()).sample(pid, now)
            await asyncio.sleep(SAMPLE_S)


async def soak(
    options: Any, logs: Path, *, every_s: float | None, until_s: float = float("inf"), tokens: int | None = None
) -> Account:
    """Runs one swarm from start to end, with an event log for each node."""
    manifest = soak_run(options.seed)
    swarm_options = LocalSwarmOptions(peers=options.peers, steps=None, threads=1, log_dir=logs)
    async with LocalSwarm(manifest, swarm_options) as swarm:
        watched = Soak(swarm, manifest.stages.count, random.Random(options.seed))
        account = watched.account
        await watched.run(every_s=every_s, until_s=until_s, tokens=tokens)
        account.tokens = swarm.progress.tokens  # goes on while the loss is measured, in both runs
        account.loss = await asyncio.to_thread(held_out_loss, str(swarm.link))
        await swarm.stop()
    account.failures, account.check = watched.failures(), verdict(logs)
    return account


def held_out_loss(link: str) -> float:
    """Held-out loss as `skipstone eval` gives it."""
    command = [sys.executable, "-m", "skipstone", "eval", link, "--microbatches", str(EVALUATED), "--json"]
    for _ in range(3):  # the data node asked first may be one that has just been killed
        asked = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=120)
        if asked.returncode == 0:
            return float(json.loads(asked.stdout)["loss"])
    raise RuntimeError(f"eval failed: {asked.stderr.decode()[-2000:]}")


async def measure(options: Any) -> dict[str, Any]:
    with kit.folder(options.keep, "disturbed") as logs:
        disturbed = await soak(options, logs, every_s=options.every, until_s=60 * options.minutes)
    tell(f"undisturbed, for {disturbed.tokens} tokens")
    with kit.folder(options.keep, "undisturbed") as logs:
        calm = await soak(options, logs, every_s=None, tokens=disturbed.tokens)
    both = {"disturbed": disturbed, "undisturbed": calm}
    return {
        "minutes": options.minutes,
        "peers": options.peers,
        "every_s": options.every,
        **{key: getattr(disturbed, key) for key in ("killed", "joined", "rounds", "caught_up", "longest_pause_s")},
        "tokens": {name: of.tokens for name, of in both.items()},
        "loss": {**{name: of.loss for name, of in both.items()}, "ratio": disturbed.loss / calm.loss},
        "target_ratio": 1.03,
        "failures": disturbed.failures | calm.failures,
        "check": {name: of.check for name, of in both.items()},
        "growth": {name: of.growth() for name, of in both.items()},
    }


if __name__ == "__main__":
    quick = {"minutes": 0.4, "peers": 5, "every": 8.0}
    kit.run(__doc__, measure, quick, minutes=20.0, peers=8, every=20.0, seed=1, keep=Path)
