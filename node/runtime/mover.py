"""The mover of a serving node: looks at the swarm now and then, and says when it should take another module."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from node.network.proofs import Proofs
from node.network.session import NetworkSession
from protocol.manifest.manifest import Manifest
from protocol.manifest.model import block_parameters
from swarm.membership.placement import Workload
from swarm.membership.rebalancing import MoveRules, MoveWatch, Standing
from swarm.membership.room import Needs
from swarm.vocabulary.types import ModuleId, Reasoned

STATE_BYTES_PER_PARAMETER = 8
"""Anchor and outer momentum, both float32."""
UNMEASURED_BYTES_PER_S = 4e6
SETTING_UP_S = 10.0
"""Time of a move besides the download, in seconds."""


class Fitting(Protocol):
    @property
    def needs(self) -> Needs: ...

    def of(self, modules: Iterable[ModuleId], held: ModuleId | None = None) -> list[ModuleId]: ...


NextModule = Callable[[], Awaitable[Reasoned[ModuleId]]]
"""Returns when the node should move, with where to and why."""


@dataclass(frozen=True, slots=True)
class MovePeriods:
    """Intervals between looks at the swarm, in seconds, each jittered by up to a fifth."""

    ordinary_s: float = 30.0
    empty_s: float = 2.0
    """Between looks for modules without a peer."""


def workload_of(manifest: Manifest) -> Workload:
    """The work of the run's modules in blocks. Stage 0's embedding and head count as at least one."""
    cost = tuple(float(max(1, blocks)) for blocks in manifest.stages.blocks)
    return Workload(manifest.modules(), cost, manifest.stages.visited_per_path)


async def stay_for_ever() -> Reasoned[ModuleId]:
    """Never moves: the `NextModule` of a node that was told which stage to host, or of a data node."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


class Mover:
    """Decides when one node moves from its module, from when it is made."""

    def __init__(
        self,
        session: NetworkSession,
        manifest: Manifest,
        proofs: Proofs,
        fitting: Fitting,
        rules: MoveRules,
        periods: MovePeriods,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._session = session
        self._manifest = manifest
        self._proofs = proofs
        self._fitting = fitting
        self._clock = session.own.clock
        self._periods = periods
        self._jitter = jitter
        self._watch = MoveWatch(workload_of(manifest), rules)
        self._since = self._clock.monotonic()

    async def next_module(self) -> Reasoned[ModuleId]:
        looked = self._clock.monotonic()
        while True:
            await asyncio.sleep(self._periods.empty_s * (0.8 + 0.4 * self._jitter()))
            now = self._clock.monotonic()
            due = now - looked >= self._periods.ordinary_s * (0.8 + 0.4 * self._jitter())
            if not due and not self._some_module_is_empty(now):
                continue
            looked = now if due else looked
            await self._proofs.refresh()
            goal = self._watch.consider(self._standing(now), now)
            if goal.value is not None:
                return Reasoned(goal.value, goal.reason)

    def _some_module_is_empty(self, now: float) -> bool:
        """A hint only: it does not count joining peers."""
        served = self._session.membership.served(now) | {self._session.own.module}
        return not all(module in served for module in self._manifest.modules() if module.stage > 0)

    def _standing(self, now: float) -> Standing:
        membership, own = self._session.membership, self._session.own
        others = tuple(a for a in membership.peers() if not membership.is_given_up(a.peer))
        goals = [m for m in self._manifest.modules() if m.stage > 0 and m != own.module]
        rates = (link.goodput_bytes_per_s for link in self._session.transport.figures().values())
        rate = max(rates, default=0.0) or UNMEASURED_BYTES_PER_S
        fitting = self._fitting.of(goals, held=own.module)
        move_s = {module: SETTING_UP_S + self._state_bytes(module) / rate for module in fitting}
        return Standing(own.announcement(), others, now - self._since, move_s, self._proofs.proven, self._fitting.needs)

    def _state_bytes(self, module: ModuleId) -> int:
        blocks = self._manifest.stages.blocks[module.stage]
        return STATE_BYTES_PER_PARAMETER * blocks * block_parameters(self._manifest.model)
