"""Path choice: the node's planner against SWARM's rule and greedy earliest finish.

`virtual`: each run is `skipstone simulate`: the node's own decisions on the computers and links of a generated problem,
at staleness 0 (steps wait for each other) and 1 (data nodes launch freely).

`live`: twelve real nodes on this machine, in three regions. Computations and links take emulated times
(`tests/e2e/emulated.py`), so the choice of paths is measured and not the cores. `CELLS` are the settings and the bars.
The arms of a seed run one after the other in random order on the same machines and links. Announced speeds are wrong by
up to a factor of 2. A swarm is measured after every replica has had ten visits, or after the longest warm-up.
Cell P is a published problem (`--instances`, six stages and three on a path) whose own schedule (`--schedule`, as
`skipstone simulate --arm replay:` has it) is the other arm. Its seconds count as a quarter, and a replica dies in the
middle of the measured time. `seconds_to_the_loss`: until the loss that the worst arm of a seed reaches at the end.
`whole`: nodes with whole paths and nodes with one module in one run, behind lines of 20 Mbit/s and 80 ms.
`share_of_bound`: throughput over that of the slowest stage if its replicas never idled. `machine_load`: busy share of
the cores; above 0.7 the emulated times are not true.
"""

import asyncio
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import all_serve, emulated, median, reached, rounded, tell
from benchmarks.problems import problem
from lab.simulate import Simulated, read_instance, read_schedule, simulated
from lab.world.arms import OURS, RULES, SWARM
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions, assign_modules
from node.observability.events import Completed, Step
from protocol.manifest.manifest import Manifest, PathsSection
from tests.e2e.emulated import REPLAY, Network, Spec
from tests.e2e.small_run import HOME, LOST, FlightMark, events_of, peers_of, read_flights, small_run, write_text

REGIMES: Final = (0, 1)


def spread(run: Simulated) -> float:
    """Difference between the visits of the most and the least visited stage, over the mean."""
    return (run.visits_most - run.visits_least) / max(1e-9, statistics.fmean(run.visits.values()))


def compared(runs: Sequence[Simulated]) -> dict[str, Any]:
    """Our throughput over that of each arm (geometric mean and least) and its mean spread of visits, by regime."""
    found: dict[str, Any] = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        for regime in REGIMES:
            mine = {(r.instance, r.seed): r for r in runs if (r.arm, r.staleness) == (OURS, regime)}
            theirs = {(r.instance, r.seed): r for r in runs if (r.arm, r.staleness) == (arm, regime)}
            ratios = [mine[key].completed / max(1, theirs[key].completed) for key in mine.keys() & theirs.keys()]
            if ratios:
                found[f"{arm}, staleness {regime}"] = {
                    "ours_over_it": round(statistics.geometric_mean(max(1e-9, ratio) for ratio in ratios), 4),
                    "least": round(min(ratios), 4),
                    "spread": round(statistics.fmean(spread(run) for run in theirs.values()), 4),
                }
    return found


def measure_virtual(options: Any) -> dict[str, Any]:
    problems = [*map(read_instance, options.instances or []), *map(problem, range(1, options.problems + 1))]
    runs: list[Simulated] = []
    for one, seed, regime, arm in itertools.product(problems, range(1, options.seeds + 1), REGIMES, options.arms):
        runs.append(simulated(one, arm, options.seconds, seed, regime, options.kill))
        tell(f"{one.name}, {arm}, staleness {regime}: {runs[-1].completed}")
    return {"compared": compared(runs), "runs": [asdict(run) for run in runs]}


PEERS: Final = 12
BLOCKS: Final = (1, 1, 1, 1, 1)
"""With twelve peers: three data nodes, three replicas of stage 1 and two of each other stage."""
SKIPPABLE: Final = len(BLOCKS) - 1
WINDOW: Final = 8


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting of the swarm. An arm is a rule, with a visit ratio (`ours-1.5`) or full paths (`ours-full`)."""

    about: str
    bar: tuple[str, str, float]
    """Two arms, and the least ratio of their tokens/s that is wanted."""
    arms: tuple[str, ...] = RULES
    per_path: int = SKIPPABLE
    blocks: tuple[int, ...] = BLOCKS
    inner_steps: int = 1_000_000

    def manifest(self, text: Path, arm: str) -> Manifest:
        """A model so small that computing it takes little next to what is emulated; only P has rounds."""
        _, _, variant = arm.partition("-")
        made = small_run(
            text,
            blocks=self.blocks,
            per_path=self.visited(arm),
            visit_ratio=float(variant) if variant.startswith("1") else 1.0,
            inner_steps=self.inner_steps,
            round_seconds=1e6,
            staleness=2,
        )
        return made.model_copy(update={"paths": PathsSection(max_jump=3)}) if REPLAY in self.arms else made

    def visited(self, arm: str) -> int:
        """Stages after stage 0 on a path."""
        return SKIPPABLE if arm.endswith("-full") else self.per_path


CELLS: Final[Mapping[str, Cell]] = {
    "D": Cell("unequal visits", ("ours-1.5", OURS, 1.18), (OURS, "ours-1.25", "ours-1.5", SWARM), 3),
    "E": Cell("full paths", (OURS, SWARM, 1.0)),
    "S": Cell("partial paths", (OURS, "ours-full", 1.2), (OURS, "ours-full", SWARM, "swarm-full"), 3),
    "P": Cell("a published problem", (OURS, REPLAY, 1.0), (OURS, REPLAY, SWARM), 3, (1,) * 6, 16),
}


DATA_FORWARD_S: Final = 0.005
FASTEST_S: Final = 0.06
SLOWEST: Final = 4.0  # forward time of the slowest replica over that of the fastest, at most
REGIONS: Final = ("a", "b", "c")
INSIDE_S: Final = 0.002
ACROSS_S: Final = (0.040, 0.150)
MISANNOUNCED: Final = 2.0
MACHINE: Final = Spec(0.0, "", window=WINDOW)
SCALE: Final = 0.25
"""Emulated seconds of a published second."""
SLOWEST_LINK_S: Final = 4.0  # Nodes break a link that is silent for 10 s; one published link takes 132 s.


@dataclass(frozen=True, slots=True)
class Environment:
    """The machines, by index of the peer, and the delays between their regions."""

    stages: tuple[int, ...]
    forward_s: tuple[float, ...]
    announced: tuple[float, ...]  # announced over true speed
    regions: tuple[str, ...]
    one_way_s: dict[str, dict[str, float]]
    of_all: Spec = MACHINE
    """What is the same for all machines."""
    routes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """A published schedule: data node and replicas of each path."""

    def replicas(self, stage: int) -> list[int]:
        return [index for index, own in enumerate(self.stages) if own == stage]

    def bound_per_s(self, per_path: int) -> float:
        """Microbatches per second if the slowest stage never idled, with equal visits to every stage."""
        stages = range(1, max(self.stages) + 1)
        rates = [
            sum(1 / replace(self.of_all, forward_s=self.forward_s[index]).visit_s for index in self.replicas(at))
            for at in stages
        ]
        return min(rates) * len(rates) / per_path


def make_environment(seed: int) -> Environment:
    """Random speeds, log-uniform; the replicas of each stage are in different regions."""
    rng = random.Random(seed)
    stages = tuple(module.stage for module in assign_modules(PEERS, BLOCKS))
    forward = [DATA_FORWARD_S if stage == 0 else round(FASTEST_S * SLOWEST ** rng.random(), 4) for stage in stages]
    decks = {stage: itertools.cycle(rng.sample(REGIONS, len(REGIONS))) for stage in set(stages)}
    one_way = {region: {region: INSIDE_S} for region in REGIONS}
    for one, other in itertools.combinations(REGIONS, 2):
        one_way[one][other] = one_way[other][one] = round(rng.uniform(*ACROSS_S), 4)
    announced = [round(MISANNOUNCED ** rng.uniform(-1, 1), 3) for _ in stages]
    return Environment(stages, tuple(forward), tuple(announced), tuple(next(decks[stage]) for stage in stages), one_way)


def published(instance: Path, schedule: Path) -> Environment:
    """The machines and links of a published problem, and the paths of its schedule."""
    one = read_instance(instance)
    stage_of = {peer: stage for stage, peers in enumerate(one.stages) for peer in peers}
    peers, costs = sorted(stage_of), one.costs
    slots = min(costs.slots.values())
    one_way = {
        str(here): {str(to): min(SLOWEST_LINK_S, SCALE * seconds) for to, seconds in costs.message_s[here].items()}
        for here in peers
    }
    routes = read_schedule(schedule, one)
    return Environment(
        tuple(stage_of[peer] for peer in peers),
        tuple(SCALE * costs.forward_s[peer] for peer in peers),
        (1.0,) * len(peers),
        tuple(map(str, peers)),
        one_way,
        Spec(0.0, "", costs.backward_factor, window=slots, slots=slots, loss_factor=one.head_factor),
        tuple((int(own), tuple(map(int, route))) for own, paths in routes.items() for route in paths),
    )


WARM_VISITS: Final = 10
LOOK_S: Final = 0.5
POINT_STEPS: Final = 4


@dataclass(frozen=True, slots=True)
class Trial:
    """One swarm; the nodes write into `folder`."""

    name: str
    arm: str
    seed: int
    environment: Environment
    folder: Path

    @property
    def cell(self) -> Cell:
        return CELLS[self.name]

    def spec(self, index: int) -> Spec:
        is_data_node = self.environment.stages[index] == 0
        return replace(
            self.environment.of_all,
            forward_s=self.environment.forward_s[index],
            network=str(self.folder / "network.json"),
            rule=self.arm.partition("-")[0],
            announced_factor=self.environment.announced[index],
            flights=str(self.flights(index)) if is_data_node else None,
            seed=index,
        )

    def flights(self, index: int) -> Path:
        return self.folder / f"flights-{index}.jsonl"

    def marks(self) -> dict[int, list[FlightMark]]:
        """The launches and ends of microbatches so far, by index of the data node."""
        return {index: read_flights(self.flights(index)) for index in self.environment.replicas(0)}


def trials(options: Any, folder: Path) -> list[Trial]:
    """The swarms, seed by seed and cell by cell; the order of the arms is random but repeatable."""
    planned = []
    for seed, name in itertools.product(range(1, options.seeds + 1), options.cells):
        is_published = REPLAY in CELLS[name].arms
        if is_published and not (options.instances and options.schedule):
            tell(f"left out: cell {name} needs --instances and --schedule")
            continue
        environment = published(options.instances[0], options.schedule) if is_published else make_environment(seed)
        arms = [arm for arm in CELLS[name].arms if arm == REPLAY or arm.partition("-")[0] in options.arms]
        random.Random(f"order {name} {seed}").shuffle(arms)
        planned += [Trial(name, arm, seed, environment, folder / f"{name}-{seed}-{arm}") for arm in arms]
    return planned


async def observe(trial: Trial, text: Path, options: Any) -> dict[str, Any]:
    """Runs one swarm. Raises RuntimeError when a node does not come up."""
    trial.folder.mkdir(parents=True)
    manifest = trial.cell.manifest(text, trial.arm)
    least_s, most_s = options.warm
    environment, curve = trial.environment, list[tuple[float, float]]()
    hosts = tuple(map(str, environment.stages)) if environment.routes else ()
    options_of_all = LocalSwarmOptions(peers=len(environment.stages), stages=hosts, threads=1)
    async with LocalSwarm(manifest, options_of_all, deployments=lambda index: emulated(trial.spec(index))) as swarm:
        regions = {str(peer.peer): environment.regions[peer.index] for peer in swarm.peers}
        named = [str(peer.peer) for peer in swarm.peers]
        routes: dict[str, list[list[str]]] = {}
        for own, route in environment.routes:
            routes.setdefault(named[own], []).append([named[index] for index in route])
        Network(regions, environment.one_way_s, routes).write(trial.folder / "network.json")
        await all_serve(swarm)
        following = asyncio.create_task(follow(swarm, curve))
        indices = {str(peer.peer): peer.index for peer in swarm.peers}
        start = time.monotonic()
        cold = [index for index, stage in enumerate(trial.environment.stages) if stage]
        while (past := time.monotonic() - start) < least_s or (cold and past < most_s):
            await asyncio.sleep(LOOK_S)
            visits = visits_of([mark for marks in trial.marks().values() for mark in marks], indices)
            cold = [index for index in cold if visits[index] < WARM_VISITS]
        begun, before = time.monotonic(), cpu_ticks()
        await asyncio.sleep(options.live_seconds / 2)
        middle = time.monotonic()
        if environment.routes:
            swarm.kill(random.Random(trial.seed).choice([i for i, stage in enumerate(environment.stages) if stage]))
        await asyncio.sleep(options.live_seconds / 2)
        ended, after = time.monotonic(), cpu_ticks()
        await swarm.stop()
        await following
        failures = sum(end.exit_code != 0 for end in swarm.ends.values())
    busy, whole = (late - early for early, late in zip(before, after, strict=True))
    own = {"machine_load": round(busy / max(1, whole), 3), "cold_replicas": cold, "failures": failures}
    tokens, marks = manifest.microbatch_tokens, trial.marks()
    if environment.routes:
        own["tokens_per_s_after_death"] = figures(trial, marks, indices, (middle, ended), tokens)["tokens_per_s"]
        own["curve"] = curve
    return figures(trial, marks, indices, (begun, ended), tokens) | own


async def follow(swarm: LocalSwarm, curve: list[tuple[float, float]]) -> None:
    """Adds the seconds from now and the mean loss of every POINT_STEPS steps until the swarm ends."""
    start, losses = time.monotonic(), list[float]()
    async for event in swarm.events():
        if isinstance(event, Step):
            losses.append(event.loss)
        if len(losses) == POINT_STEPS:
            curve.append((round(time.monotonic() - start, 2), round(statistics.fmean(losses), 4)))
            losses.clear()


def visits_of(marks: Sequence[FlightMark], indices: Mapping[str, int]) -> Counter[int]:
    """Visits of completed microbatches, by index of the replica."""
    return Counter(indices[peer] for mark in marks if mark.kind == HOME for peer in mark.peers)


def figures(
    trial: Trial,
    flights: Mapping[int, Sequence[FlightMark]],
    indices: Mapping[str, int],
    span: tuple[float, float],
    tokens: int,
) -> dict[str, Any]:
    """The figures of one swarm between two times; `tokens` are those of a microbatch."""
    environment, bound = trial.environment, trial.environment.bound_per_s(trial.cell.visited(trial.arm))
    within = {own: [mark for mark in marks if span[0] <= mark.at < span[1]] for own, marks in flights.items()}
    completed = [(own, mark) for own, marks in within.items() for mark in marks if mark.kind == HOME]
    per_s, visits = len(completed) / (span[1] - span[0]), visits_of([mark for _, mark in completed], indices)
    paths = [(own, *(indices[peer] for peer in mark.peers), own) for own, mark in completed]
    links = [link for path in paths for link in itertools.pairwise(path)]
    crossed = sum(environment.regions[one] != environment.regions[other] for one, other in links)
    return {
        "cell": trial.name,
        "arm": trial.arm,
        "seed": trial.seed,
        "tokens_per_s": round(per_s * tokens, 1),
        "share_of_bound": round(per_s / bound, 3),
        "hops_between_regions": round(crossed / max(1, len(links)), 3),
        "visits_per_replica": {index: visits[index] for index, stage in enumerate(environment.stages) if stage},
        "completed": len(completed),
        "abandoned": sum(mark.kind == LOST for marks in within.values() for mark in marks),
    }


def cpu_ticks() -> tuple[int, int]:
    """Busy and all ticks of the machine's cores. Idle priority counts as not busy; zeros without Linux's /proc."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0, 0
    ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[1] - ticks[3] - ticks[4], sum(ticks)


def report(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By cell: medians of each arm, ratios of the bar's arms by seed, and whether the bar is held."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(run["cell"] for run in runs):
        cell, own = CELLS[name], [run for run in runs if run["cell"] == name]
        one, other, limit = cell.bar
        values = {(run["arm"], run["seed"]): run["tokens_per_s"] for run in own if run["tokens_per_s"]}
        ratios = [
            value / values[other, seed]
            for (arm, seed), value in values.items()
            if arm == one and (other, seed) in values
        ]
        mean = statistics.geometric_mean(ratios) if ratios else None
        times: dict[str, list[float | None]] = {}
        for seed in {run["seed"] for run in own if run.get("curve")}:
            curves = {run["arm"]: run["curve"] for run in own if run["seed"] == seed and run.get("curve")}
            loss = max(curve[-1][-1] for curve in curves.values())
            for arm, curve in curves.items():
                times.setdefault(arm, []).append(reached(curve, 0, loss, 1.0))
        found[name] = {
            "about": cell.about,
            **({"seconds_to_the_loss": {arm: median(each) for arm, each in times.items()}} if times else {}),
            "arms": {
                arm: {
                    key: median(run[key] for run in own if run["arm"] == arm)
                    for key in ("tokens_per_s", "share_of_bound", "hops_between_regions", "machine_load")
                }
                for arm in dict.fromkeys(run["arm"] for run in own)
            },
            "ratios": {f"{one} / {other}": [round(ratio, 3) for ratio in ratios]},
            "bar": {"limit": limit, "is": rounded(mean), "held": mean is not None and mean >= limit},
        }
    return found


async def measure_live(options: Any) -> dict[str, Any]:
    runs = []
    with kit.folder(None, "paths") as folder:
        text = write_text(folder / "text")
        for trial in trials(options, folder):
            try:
                runs.append(await observe(trial, text, options))
            except RuntimeError as error:  # a node did not come up; the other swarms are worth having
                tell(f"left out: {trial.folder.name}: {error}")
            else:
                tell(runs[-1])
    return {"cells": report(runs), "runs": runs}


WHOLE: Final = ("0-3", "0-3", "0", "1", "2", "3")  # Stages of each node


async def measure_whole(options: Any) -> dict[str, Any]:
    """Tokens per second of each node of WHOLE, behind home lines. A visit to one of the 4 modules counts a quarter."""
    codecs = dict.fromkeys(("activations", "gradients"), "int8")
    small: dict[str, Any] = {"hidden": 256, "feed_forward": 64, "sequence": 128, "rows": 16, "microbatches": 4}
    manifest = kit.run_of("whole", (1, 1, 1, 1), sections={"codecs": codecs}, inner_steps=50, staleness=1, **small)
    with kit.folder(None, "whole") as folder:
        spec = Spec(0.01, str(folder / "network.json"), bytes_per_s=20e6 / 8, one_line=True)
        options_of_all = LocalSwarmOptions(peers=len(WHOLE), stages=WHOLE, threads=1, log_dir=folder / "logs")
        async with LocalSwarm(manifest, options_of_all, deployments=lambda _: emulated(spec)) as swarm:
            owner = {peer: node.index for node in swarm.peers for peer in peers_of(node, 4)}
            Network(dict.fromkeys(owner, "home"), {"home": {"home": 0.04}}).write(Path(spec.network))
            await all_serve(swarm)
            await asyncio.sleep(options.warm[0])
            before, begun = {each.microbatch for each in completed_in(folder / "logs")}, time.monotonic()
            await asyncio.sleep(options.live_seconds)
            seconds, done = time.monotonic() - begun, completed_in(folder / "logs")
    new = [(each.peer, *(hop.split("@")[1] for hop in each.hops)) for each in done if each.microbatch not in before]
    visits = Counter(owner[peer] for peers in new for peer in peers)
    rates = [round(visits[index] * manifest.microbatch_tokens / 4 / seconds) for index in range(len(WHOLE))]
    return {"tokens_per_s": dict(enumerate(rates)), "whole_over_single": sum(rates[:2]) * 2 / max(1, sum(rates[2:]))}


def completed_in(logs: Path) -> list[Completed]:
    return [event for event in events_of(logs) if isinstance(event, Completed)]


def measure(options: Any) -> dict[str, Any]:
    found = measure_virtual(options) if "virtual" in options.parts else {}
    for part, measured in (("live", measure_live), ("whole", measure_whole)):
        if part in options.parts:
            found[part] = asyncio.run(measured(options))
    return found


if __name__ == "__main__":
    virtual = {"problems": 22, "instances": [Path], "seeds": 1, "seconds": 300.0, "arms": RULES, "kill": 0.0}
    live = {"schedule": Path, "cells": tuple(CELLS), "live_seconds": 30.0, "warm": [20.0, 45.0]}
    quick = {"problems": 1, "seconds": 20.0, "cells": ["E"], "live_seconds": 10.0, "warm": [2.0, 10.0]}
    kit.run(__doc__, measure, quick, parts=["virtual"], **virtual, **live)
