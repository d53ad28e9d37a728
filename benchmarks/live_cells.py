"""The cells of `benchmarks/paths_live.py`: what the swarm is like in each, which ways to choose paths are compared
there, and what is asked of ours. The grounds: machines and regions by seed, and what they could do at best.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lab.world.arms import GREEDY, OURS, SWARM
from node.local_swarm.setup import assign_modules
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.routing.path_rules import PathRules
from swarm.routing.stage_balance import ring_stages
from swarm.vocabulary.types import ModuleId
from tests.e2e.emulated import Spec
from tests.e2e.small_run import small_run

PEERS: Final = 12
BLOCKS: Final = (1, 1, 1, 1, 1)
"""With twelve peers: three data nodes, three replicas of stage 1 and two of each other stage."""
SKIPPABLE: Final = len(BLOCKS) - 1
DATA_FORWARD_S: Final = 0.005
DATA_WORK: Final = 6
"""Of a microbatch at its data node, in ways out: embedding and head, each with its way back."""
FASTEST_S: Final = 0.06
SLOWEST: Final = 4.0
REGIONS: Final = ("a", "b", "c")
INSIDE_S: Final = 0.002
ACROSS_S: Final = (0.040, 0.150)
"""One way between continents."""
MISANNOUNCED: Final = 2.0
"""Peers announce up to so many times their speed, or as many times less."""
SLOWED_BY: Final = 4.0
BEFORE_S: Final = 10.0
"""Measured before a change."""
AFTER_S: Final = 45.0
"""And after it."""
SLOW_SPELL_S: Final = (15.0, 60.0)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to choose paths."""

    rule: str
    visit_ratio: float = 1.0
    full: bool = False
    """Whether paths visit all stages whatever the cell says."""


ARMS: Final[Mapping[str, Arm]] = {
    "ours": Arm(OURS),
    "swarm": Arm(SWARM),
    "greedy": Arm(GREEDY),
    "ours-1.25": Arm(OURS, visit_ratio=1.25),
    "ours-1.5": Arm(OURS, visit_ratio=1.5),
    "ours-full": Arm(OURS, full=True),
    "swarm-full": Arm(SWARM, full=True),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """What is asked of a cell: of the ratio of two arms' figures (geometric mean over the seeds), or of one arm's
    figure itself (median)."""

    figure: str
    limit: float
    at_least: bool
    arm: str = "ours"
    against: str | None = "swarm"


STEP_S, TOKENS_PER_S, AFTER_TOKENS, RECOVERED_S, ABROAD = (
    "step_s", "tokens_per_s", "tokens_after_change", "recovered_s", "hops_between_regions",
)  # fmt: skip
PLAIN: Final = ("ours", "swarm", "greedy")


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of the swarm."""

    about: str
    figure: str = TOKENS_PER_S
    """That the arms are compared by."""
    bars: tuple[Bar, ...] = ()
    arms: tuple[str, ...] = PLAIN
    per_step: int = 4
    """Microbatches of one step of a data node. With four, as many as stages after stage 0, partial paths visit all
    equally often in a step."""
    staleness: int = 2
    window: int = 8
    per_path: int = SKIPPABLE
    links: float = 1.0
    """Times as far apart."""
    bytes_per_s: float | None = None
    hop_slots: int | None = None
    changes: str = ""
    """`once`: the fastest replica of the weakest stage becomes slower. `spells`: every replica is slower a third of the
    time."""

    @property
    def in_flight(self) -> int:
        """Microbatches under way at most, of all data nodes together."""
        each = min(self.window, self.per_step * (1 + self.staleness))
        return each * assign_modules(PEERS, BLOCKS).count(ModuleId(0))

    def visited(self, arm: Arm) -> int:
        """Stages after stage 0 that a path visits."""
        return SKIPPABLE if arm.full else self.per_path

    def run(self, text: Path, arm: Arm) -> Manifest:
        """A model so small that computing it costs nothing next to what is emulated, and no rounds.

        Raises:
            ConfigError: manifests have no ratio of visits yet.
        """
        step = small_run(text).microbatch_tokens * self.per_step
        aside = {"inner_steps": 1_000_000, "round_seconds": 1e6}
        made = small_run(
            text, blocks=BLOCKS, per_path=self.visited(arm), inner_tokens=step, staleness=self.staleness, **aside
        )
        if arm.visit_ratio == 1.0:
            return made
        table = made.model_dump(mode="json", exclude_none=True)
        table["stages"]["visit_ratio"] = arm.visit_ratio
        return manifest_from_table(table)


def _step_bar(limit: float) -> tuple[Bar, ...]:
    return (Bar(STEP_S, limit, at_least=False),)


def _speed_bar(limit: float, arm: str = "ours", against: str = "swarm") -> Bar:
    return Bar(TOKENS_PER_S, limit, at_least=True, arm=arm, against=against)


CELLS: Final[Mapping[str, Cell]] = {
    "A1": Cell("steps wait, 2 microbatches each", STEP_S, _step_bar(0.85), staleness=0, per_step=2),
    "A2": Cell(
        "steps wait, links x 3, 100 Mbit/s", STEP_S, _step_bar(0.85), staleness=0, links=3.0, bytes_per_s=100e6 / 8
    ),
    "A3": Cell("steps wait, 4 microbatches each", STEP_S, _step_bar(0.95), staleness=0),
    "B1": Cell("free, 2 slots a hop", bars=(_speed_bar(1.2),), hop_slots=2),
    "B3": Cell("free, 2 slots a hop, links x 3", bars=(_speed_bar(1.2),), hop_slots=2, links=3.0),
    "C": Cell(
        "free, window 4, a fast replica becomes 4 times slower",
        AFTER_TOKENS,
        (Bar(AFTER_TOKENS, 1.2, at_least=True), Bar(RECOVERED_S, 15.0, at_least=False, against=None)),
        window=4,
        changes="once",
    ),
    "C2": Cell(
        "free, window 4, each replica 4 times slower a third of the time",
        bars=(_speed_bar(1.05),),
        window=4,
        changes="spells",
    ),
    "D": Cell(
        "free, partial paths, unequal visits",
        bars=(_speed_bar(1.13, "ours-1.25", "ours"), _speed_bar(1.18, "ours-1.5", "ours")),
        arms=("ours", "ours-1.25", "ours-1.5", "swarm"),
        per_path=3,
    ),
    "E": Cell("free, window 8", bars=(_speed_bar(1.0), Bar(ABROAD, 0.7, at_least=False))),
    "S": Cell(
        "free, partial paths against full ones",
        bars=(_speed_bar(1.2, "ours", "ours-full"),),
        arms=("ours", "ours-full", "swarm", "swarm-full"),
        per_path=3,
    ),
}


# ---- grounds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ground:
    """The machines, by index, and how far apart their regions are."""

    stages: tuple[int, ...]
    forward_s: tuple[float, ...]
    announced: tuple[float, ...]
    """Announced over true speed."""
    regions: tuple[str, ...]
    one_way_s: dict[str, dict[str, float]]

    def visit_s(self, index: int) -> float:
        """Out and back."""
        return Spec(self.forward_s[index], "").visit_s

    def replicas(self, stage: int) -> list[int]:
        return [index for index, own in enumerate(self.stages) if own == stage]

    def visits_per_s(self, stage: int) -> float:
        """What the stage's replicas can do together if none is ever idle."""
        return sum(1 / self.visit_s(index) for index in self.replicas(stage))

    @property
    def weakest(self) -> int:
        """The stage that can do least."""
        return min(range(1, max(self.stages) + 1), key=self.visits_per_s)

    def bound_per_s(self, per_path: int) -> float:
        """Microbatches of all data nodes together, with equal visits to every stage: what the weakest stage lets
        through."""
        return self.visits_per_s(self.weakest) * max(self.stages) / per_path

    def round_trip_s(self, per_path: int) -> float:
        """Mean time without waiting of microbatches that take replicas in proportion to their speed."""
        stages = max(self.stages) + 1
        sets = [ring_stages(PathRules(stages, min(per_path, stages - 1)), turn) for turn in range(stages - 1)]
        trips = [self._trip_s(data_node, visited) for data_node in self.replicas(0) for visited in sets]
        return statistics.fmean(trips)

    def _trip_s(self, data_node: int, visited: Iterable[int]) -> float:
        stops = [{data_node: 1.0}, *(self._shares(stage) for stage in visited), {data_node: 1.0}]
        compute = sum(share * self.visit_s(index) for stop in stops[1:-1] for index, share in stop.items())
        ways = sum(
            one_share * other_share * self.between(one, other)
            for here, there in itertools.pairwise(stops)
            for (one, one_share), (other, other_share) in itertools.product(here.items(), there.items())
        )
        return DATA_WORK * self.forward_s[data_node] + compute + 2 * ways

    def _shares(self, stage: int) -> dict[int, float]:
        whole = self.visits_per_s(stage)
        return {index: 1 / (self.visit_s(index) * whole) for index in self.replicas(stage)}

    def between(self, one: int, other: int) -> float:
        """One way."""
        return self.one_way_s[self.regions[one]][self.regions[other]]

    def knee(self, per_path: int) -> float:
        """Microbatches that have to be under way for the bound to be reached if nobody ever waited."""
        return self.bound_per_s(per_path) * self.round_trip_s(per_path)

    def slowed(self, index: int, factor: float) -> Ground:
        """The same with one machine slower."""
        forward = [seconds * (factor if at == index else 1.0) for at, seconds in enumerate(self.forward_s)]
        return replace(self, forward_s=tuple(forward))

    def table(self) -> list[dict[str, Any]]:
        rows = zip(self.stages, self.regions, self.forward_s, self.announced, strict=True)
        return [
            {"stage": stage, "region": region, "forward_s": seconds, "announced": announced}
            for stage, region, seconds, announced in rows
        ]


def make_ground(seed: int, links: float = 1.0) -> Ground:
    """Speeds by chance, evenly on a logarithmic scale; the replicas of each stage in different regions."""
    rng = random.Random(seed)
    stages = tuple(module.stage for module in assign_modules(PEERS, BLOCKS))
    forward = [DATA_FORWARD_S if stage == 0 else round(FASTEST_S * SLOWEST ** rng.random(), 4) for stage in stages]
    decks = {stage: itertools.cycle(rng.sample(REGIONS, len(REGIONS))) for stage in set(stages)}
    one_way = {region: {region: INSIDE_S} for region in REGIONS}
    for one, other in itertools.combinations(REGIONS, 2):
        one_way[one][other] = one_way[other][one] = round(links * rng.uniform(*ACROSS_S), 4)
    announced = [round(MISANNOUNCED ** rng.uniform(-1, 1), 3) for _ in stages]
    return Ground(stages, tuple(forward), tuple(announced), tuple(next(decks[stage]) for stage in stages), one_way)


# ---- changes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A machine's speed changes while it is measured."""

    after_s: float
    index: int
    factor: float


def changes_of(cell: Cell, ground: Ground, seed: int, seconds: float) -> list[Change]:
    """What changes in the measured seconds of a cell, in order."""
    if cell.changes == "once":
        return [Change(BEFORE_S, min(ground.replicas(ground.weakest), key=ground.visit_s), SLOWED_BY)]
    if cell.changes == "spells":
        rng = random.Random(f"spells {seed}")
        hops = [index for index, stage in enumerate(ground.stages) if stage]
        return sorted((c for index in hops for c in _spells(index, rng, seconds)), key=lambda change: change.after_s)
    return []


def _spells(index: int, rng: random.Random, seconds: float) -> list[Change]:
    """Of one machine: spells follow each other, each slow with a chance of one in three."""
    found, at = list[Change](), -rng.uniform(0, SLOW_SPELL_S[0])
    while at < seconds:
        found.append(Change(max(0.0, at), index, SLOWED_BY if rng.random() < 1 / 3 else 1.0))
        at += rng.uniform(*SLOW_SPELL_S)
    return found


def measured_s(cell: Cell, seconds: float) -> float:
    """How long a swarm of the cell is measured."""
    return BEFORE_S + AFTER_S if cell.changes == "once" else seconds
