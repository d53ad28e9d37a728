"""A planned iteration beside the best one that a long central search finds: how much planning has left lying there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from node.lab.simulation.simulate import Simulated, World
from swarm.simulation.baselines.earliest_return import earliest_return
from swarm.simulation.baselines.search import Searched, search_from_best
from swarm.simulation.instance import Instance, Plan
from swarm.simulation.iteration import Iteration, played
from swarm.vocabulary.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both iterations as played in the same world, and what the search was."""

    planned: Iteration
    searched: Iteration
    search_s: float
    forecasts: int

    @property
    def ratio(self) -> float:
        """Makespan as planned over that of the search."""
        return self.planned.played.makespan_s / self.searched.played.makespan_s

    def as_json(self) -> dict[str, Any]:
        """Keys that stand beside those of the planned iteration."""
        return {"search_makespan_seconds": self.searched.played.makespan_s, "search_ratio": self.ratio}

    def sentence(self) -> str:
        """For people."""
        search = f"a search of {self.search_s:g} CPU seconds ({self.forecasts:,} forecasts) found"
        makespan = f"{self.searched.played.makespan_s:.2f} s"
        if self.ratio > 1:
            return f"The plan takes {100 * (self.ratio - 1):.1f} % longer than the best that {search}: {makespan}."
        return f"The plan takes no longer than the best that {search}: {makespan}."


def compare(simulated: Simulated, world: World, seconds: float) -> Comparison:
    """The last iteration beside the outcome of a search, which knows what is believed and is played in the same world.

    Args:
        seconds: CPU time of the search.

    Raises:
        ConfigError: the plan blocks itself, even without steps back.
    """
    instance, planned = simulated.instance, simulated.last
    try:
        found = searched(instance, planned.plan, seconds, world.seed)
    except ValueError as error:
        raise ConfigError(f"{instance.name} cannot be searched: {error}") from error
    iteration = played(instance, found.plan, world.costs(instance), (0.0, 0.0), planned.bound_s)
    return Comparison(planned, iteration, seconds, found.forecasts)


def searched(instance: Instance, planned: Plan, seconds: float, seed: int) -> Searched:
    """The outcome of a search by CPU time, from the plan that was made or the greedy one, whichever is shorter.

    Raises:
        ValueError: a plan blocks itself, even without steps back, or the rules allow too few orders for equal visits.
    """
    starts = [planned, earliest_return(instance)]
    return search_from_best(instance, starts, seconds, time.process_time, seed)
