"""Kills or freezes a replica in the middle of an exchange, and sees what becomes of the round and of the others."""

import asyncio
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from node.local_swarm.local_swarm import LocalSwarm
from node.observability.events import CaughtUp, RoundProgress
from protocol.manifest.manifest import Manifest, manifest_from_table
from tests.e2e.round_watch import LOOK_S, PATIENCE_S, LogTail, RoundWatch

Role = Literal["member", "convener", "reducer"]
MODULE = "1.0"
STAGE = 1


def heavy_run(text: Path, *, blocks: int, feed_forward: int = 4096, inner_steps: int = 4) -> Manifest:
    """One stage that is much to exchange and little to compute."""
    sizes = {"vocabulary": 257, "hidden": 256, "heads": 4, "kv_heads": 2, "sequence": 16}
    optimizers = {"inner": {"learning_rate": 3e-4}, "outer": {"learning_rate": 0.7, "momentum": 0.5}}
    schedule = {"kind": "constant", "warmup_steps": 5, "total_steps": 1000}
    steps = {"rows": 1, "inner_tokens": 32, "inner_steps": inner_steps, "staleness": 1}
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "heavy",
            "seed": 11,
            "model": {**sizes, "feed_forward": feed_forward},
            "stages": {"blocks": (0, blocks)},
            "data": {"source": f"path:{text}", "held_out": 0.1},
            "training": {**steps, **optimizers, "schedule": schedule},
        }
    )


def replicas_of(swarm: LocalSwarm) -> dict[str, int]:
    """The live replicas of the stage, with their indices."""
    return {p.peer: p.index for p in swarm.peers if p.stage == STAGE and p.index not in swarm.ends}


@dataclass(frozen=True, slots=True)
class Blow:
    """A replica that was struck, in which round, and how far it really was."""

    victim: str
    index: int
    round: int
    percent: int
    at: float


class Striker:
    def __init__(self, swarm: LocalSwarm, tail: LogTail[RoundProgress]) -> None:
        self._swarm = swarm
        self._tail = tail
        self._chunks: dict[str, int] = {}

    async def strike(self, role: Role, percent: int, number: signal.Signals) -> Blow:
        """At the first round from now on in which somebody has this role, when it is so far."""
        self._tail.skip()
        begun: set[int] = set()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                batch = self._of_the_stage()
                for seen in batch:
                    self._chunks[seen.peer] = seen.chunks
                    if seen.percent == 0:
                        begun.add(seen.round)  # else its beginning was before our time
                    if seen.round in begun and seen.percent >= percent and self._is_it(seen, role):
                        return self._hit(seen, number, batch)
                await asyncio.sleep(LOOK_S)

    def _of_the_stage(self) -> list[RoundProgress]:
        return [seen for _, seen in self._tail.read() if seen.module == MODULE]

    def _is_it(self, seen: RoundProgress, role: Role) -> bool:
        if role == "convener" or seen.peer == seen.convener:
            return role == "convener" and seen.peer == seen.convener
        others = [peer for peer in replicas_of(self._swarm) if peer in self._chunks and peer != seen.convener]
        if len(others) < len(replicas_of(self._swarm)) - 1:
            return False
        best = max if role == "reducer" else min
        return seen.peer == best(others, key=lambda peer: (self._chunks[peer], peer))

    def _hit(self, seen: RoundProgress, number: signal.Signals, batch: list[RoundProgress]) -> Blow:
        index = replicas_of(self._swarm)[seen.peer]
        self._swarm.kill(index, number)
        at = time.monotonic()
        later = [p.percent for p in (*batch, *self._of_the_stage()) if (p.peer, p.round) == (seen.peer, seen.round)]
        return Blow(seen.peer, index, seen.round, max([seen.percent, *later]), at)


@dataclass(frozen=True, slots=True)
class Aftermath:
    blow: Blow
    survivors: frozenset[str]
    commits_s: dict[str, float]
    attempts: int
    back_s: float | None
    caught_up: bool


async def see_it_through(swarm: LocalSwarm, watch: RoundWatch, blow: Blow, *, frozen: bool) -> Aftermath:
    """Until the survivors have committed; a frozen replica is woken two rounds later, and has taken part again."""
    survivors = frozenset(replicas_of(swarm)) - {blow.victim}
    stands = await watch.all_at(survivors, blow.round)
    attempts = max([c.attempts for p in survivors for c in watch.commits_of(p) if c.round == blow.round], default=0)
    commits_s = {peer: stand.at - blow.at for peer, stand in stands.items()}
    if not frozen:
        return Aftermath(blow, survivors, commits_s, attempts, None, caught_up=False)
    missed = max(stand.event.round for stand in stands.values()) + 1
    await watch.all_at(survivors, missed)
    before = len(watch.stands)
    woken = time.monotonic()
    swarm.kill(blow.index, signal.SIGCONT)
    await watch.all_together(survivors | {blow.victim}, missed)
    fetched = [s for s in watch.stands[before:] if s.peer == blow.victim and isinstance(s.event, CaughtUp)]
    return Aftermath(blow, survivors, commits_s, attempts, time.monotonic() - woken, caught_up=bool(fetched))
