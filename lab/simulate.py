"""`skipstone simulate`: completed microbatches and stage visits of a swarm in virtual time."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.views.output import announce, print_json
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from lab.world.instance import Instance
    from swarm.routing.measured_times import PeerRoute
    from swarm.vocabulary.types import PeerId

# Schedules of a solver can be large, but not unbounded.
MAX_FILE_BYTES = 2**31
REPLAY = "replay:"


def simulate(
    instance: Annotated[Path, typer.Option(help="JSON file with the peers, stages and costs of a swarm.")],
    arm: Annotated[
        str, typer.Option(help="How to choose paths: `ours`, `swarm`, `greedy`, or `replay:FILE` for a schedule.")
    ] = "ours",
    seconds: Annotated[float, typer.Option(min=1, max=86400, help="Length of the run, in virtual seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of message delays and failures.")] = 1,
    staleness: Annotated[
        int,
        typer.Option(min=0, max=1, help="Steps that a data node may run ahead: 0 waits for each step, 1 overlaps two."),
    ] = 1,
    kill: Annotated[
        float, typer.Option(min=0, max=5, help="Share of peers that fail and return per minute (0: none).")
    ] = 0.0,
    lie: Annotated[
        float, typer.Option(min=0, help="Factor on the visits that the first data node announces (1: the truth).")
    ] = 1.0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a swarm described in a file in virtual time, and count its microbatches."""
    announce("skipstone simulate: virtual time", as_json=json)
    report = asdict(simulated(read_instance(instance), arm, seconds, seed, staleness, kill, lie))
    if json:
        print_json(report)
        return
    for what, value in report.items():
        typer.echo(f"{what.replace('_', ' ')}: {f'{value:.3f}' if isinstance(value, float) else value}")


@dataclass(frozen=True, slots=True)
class Simulated:
    """Results of a simulated swarm.

    Args:
        honest: completed microbatches of the data nodes that announce their true visits.
        pace: completed microbatches per second.
        visits: completed visits by stage after stage 0; then those of the least and the most visited stage.
        planning_cpu_seconds: CPU time spent on planning, per data node.
        alive_share: mean share of the swarm's compute that was alive.
    """

    instance: str
    arm: str
    seconds: float
    seed: int
    staleness: int
    kill: float
    lie: float
    completed: int
    honest: int
    pace: float
    visits: dict[str, int]
    visits_least: int
    visits_most: int
    launched: int
    abandoned: int
    repaired: int
    duplicated: int
    alive_share: float
    planning_cpu_seconds: float
    planning_cpu_ms_per_launch: float


def simulated(
    problem: Instance, arm: str, seconds: float, seed: int, staleness: int = 1, kill: float = 0.0, lie: float = 1.0
) -> Simulated:
    """Simulates a swarm whose paths `arm` plans. Raises ConfigError for an unknown arm or an unusable schedule."""
    from lab.world.arms import RULES, planner_of
    from lab.world.churn import run_churn
    from lab.world.world import TOKENS

    schedule = read_schedule(Path(arm.removeprefix(REPLAY)), problem) if arm.startswith(REPLAY) else None
    if schedule is None and arm not in RULES:
        raise ConfigError(
            f"{arm!r} is not an arm of simulate", hint=f"Choose one of {', '.join(RULES)} or {REPLAY}FILE."
        )
    done = run_churn(problem, seconds, kill, seed, staleness, planner_of(arm, seed, TOKENS, schedule), lie)
    visits = {str(stage): done.accumulated.get(stage, 0) for stage in range(1, problem.rules.stages)}
    return Simulated(
        instance=problem.name,
        arm=arm,
        seconds=seconds,
        seed=seed,
        staleness=staleness,
        kill=kill,
        lie=lie,
        completed=done.completed,
        honest=done.honest,
        pace=done.completed / seconds,
        visits=visits,
        visits_least=min(visits.values(), default=0),
        visits_most=max(visits.values(), default=0),
        launched=done.launched,
        abandoned=done.abandoned,
        repaired=done.repaired,
        duplicated=done.duplicated,
        alive_share=done.alive_share,
        planning_cpu_seconds=done.planning_cpu_s / len(problem.stages[0]),
        planning_cpu_ms_per_launch=1e3 * done.planning_cpu_s / max(1, done.launched),
    )


def read_instance(path: Path) -> Instance:
    """Reads a path-planning problem from a JSON file. Raises ConfigError."""
    from lab.world.instance import from_json

    return from_json(_read_json(path))


def read_schedule(path: Path, problem: Instance) -> dict[PeerId, list[PeerRoute]]:
    """Reads each data node's routes in launch order, from `{"paths": [{"data_node": p, "peers": [q, ...]}, ...]}`.

    Raises ConfigError if the file is unreadable or a path breaks the problem's rules.
    """
    from lab.world.instance import peer_of

    stage_of = {peer: stage for stage, peers in enumerate(problem.stages) for peer in peers}
    routes: dict[PeerId, list[PeerRoute]] = {peer: [] for peer in problem.stages[0]}
    try:
        for path_of_one in _read_json(path)["paths"]:
            data_node, peers = peer_of(int(path_of_one["data_node"])), path_of_one["peers"]
            route = tuple(peer_of(int(peer)) for peer in peers)
            fault = problem.rules.fault([stage_of[peer] for peer in route])
            if fault is not None:
                raise ConfigError(f"{path} has an illegal path: {fault}")
            routes[data_node].append(route)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a schedule of {problem.name}: {error!r}") from error
    # A data node without a path would be idle for the whole run.
    if not all(routes.values()):
        raise ConfigError(f"{path} has no path for at least one data node of {problem.name}")
    return routes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        value = json_module.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value
