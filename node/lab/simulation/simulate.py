"""What `skipstone simulate` does: reads or makes a swarm, plans and plays one iteration of it, and reports."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarm.routing.cost_model import Costs
from swarm.simulation.central.central_planner import central_iteration
from swarm.simulation.churn import run_churn, share_of_ideal
from swarm.simulation.deaths import after_death
from swarm.simulation.generate import Shape, generate, jittered, regions_from_json
from swarm.simulation.instance import Instance, from_json, index_of, peer_of
from swarm.simulation.iteration import Conduct, Iteration, run_iterations
from swarm.simulation.negotiation_world import Network
from swarm.vocabulary.errors import ConfigError

MAX_FILE_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class World:
    """How the world differs from what the planner believes.

    Args:
        jitter: spread (sigma) of the lognormal factor on every cost; 0 for none.
        seed: of the jitter, and of the delays of messages.
    """

    jitter: float = 0.0
    seed: int = 0

    def costs(self, instance: Instance) -> Costs | None:
        """What costs turn out to be; None when they are as believed."""
        if self.jitter <= 0:
            return None
        return jittered(instance.costs, self.jitter, random.Random(self.seed))  # noqa: S311 - a repeatable world


@dataclass(frozen=True, slots=True)
class Simulated:
    """Iterations, one after another, and what they were of."""

    instance: Instance
    iterations: Sequence[Iteration]

    @property
    def last(self) -> Iteration:
        return self.iterations[-1]

    def as_json(self) -> dict[str, Any]:
        """The stable form, of the last iteration: seconds, and the paths of each data node in launch order; then the
        talk up to its start."""
        last = self.last
        return {
            "makespan_seconds": last.played.makespan_s,
            "planning_cpu_seconds": last.planning_cpu_s,
            "lower_bound_seconds": last.bound_s,
            "paths": [
                {"data_node": index_of(data_node), "peers": [index_of(peer) for peer in route]}
                for data_node, routes in last.plan.items()
                for route in routes
            ],
            "talk": asdict(last.talk),
            "iterations": [iteration.played.makespan_s for iteration in self.iterations],
            "visits_per_stage": {str(stage): count for stage, count in sorted(last.visits.items())},
            "planning_cpu_seconds_per_data_node": last.planning_cpu_each_s,
        }


def read_instance(path: Path) -> Instance:
    """The instance in a JSON file.

    Raises:
        ConfigError: it cannot be read, or is no instance.
    """
    return from_json(_read_json(path))


def make_instance(regions: Path, shape: Shape, seed: int) -> Instance:
    """A made-up swarm over the regions in a JSON file.

    Raises:
        ConfigError: the file or the shape cannot be used.
    """
    return generate(shape, regions_from_json(_read_json(regions)), seed)


def simulate(instance: Instance, conduct: Conduct, world: World, *, central: bool = False) -> Simulated:
    """Plans with what is believed, and plays it in the world as it is.

    Args:
        central: by one planner that knows everything, each iteration alike.

    Raises:
        ConfigError: a stage cannot be visited at all.
    """
    costs = world.costs(instance)
    try:
        if central:
            return Simulated(instance, [central_iteration(instance, time.process_time, costs)] * conduct.iterations)
        return Simulated(instance, run_iterations(instance, conduct, time.process_time, costs, world.seed))
    except ValueError as error:
        raise ConfigError(f"{instance.name} cannot be planned: {error}") from error


def simulate_churn(
    instance: Instance, share_a_minute: float, minutes: float, network: Network, seed: int
) -> dict[str, Any]:
    """What is completed while peers come and go, beside the same time without churn."""
    calm = run_churn(instance, 60 * minutes, 0.0, seed, network)
    churned = run_churn(instance, 60 * minutes, share_a_minute, seed, network)
    return {"share_of_ideal": share_of_ideal(churned, calm), "calm_completed": calm.completed, **asdict(churned)}


def simulate_death(instance: Instance, gone: int, conduct: Conduct, seed: int) -> dict[str, float]:
    """What is left of a settled plan when a peer dies, beside a new plan; seconds.

    Raises:
        ConfigError: there is no such peer, or nobody else serves its stage.
    """
    peer = peer_of(gone)
    if peer not in instance.costs.stage_of():
        raise ConfigError(f"{instance.name} has no peer {gone}", hint="Peers are numbered from 0.")
    try:
        costs = after_death(instance, peer, conduct.network, time.process_time, seed)
    except ValueError as error:
        raise ConfigError(f"{instance.name} cannot go on without peer {gone}: {error}") from error
    return {f"{what}_seconds": seconds for what, seconds in asdict(costs).items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return value
