"""A path-scheduling problem as plain data: fixed peers, fixed stages, measured costs.

The JSON form has the keys `name`, `nodes`, `stages` (peers of each stage, stage 0 first), `forward_seconds[p]`,
`backward_factor`, `head_factor`, `task_overhead_seconds`, `message_seconds[p][q]`, `slots[p]`, `stages_per_path`,
`microbatches_per_data_node` and `order` (`max_forward_jump`, `max_back_stops`, `max_back_distance`), and may have
`visit_ratio` (1 without it: equal visits); other keys are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.routing.cost_model import Costs
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import PeerId

MAX_PEERS = 20_000
_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Instance:
    """A problem: costs, rules, and how many microbatches each data node sends in one iteration."""

    name: str
    costs: Costs
    rules: PathRules
    microbatches: int

    @property
    def total(self) -> int:
        """Microbatches of all data nodes."""
        return self.microbatches * len(self.costs.data_nodes)


def peer_of(index: int) -> PeerId:
    """The name of a peer of an instance; names sort as their numbers do."""
    return PeerId(f"{index:0{_DIGITS}d}")


def from_json(data: Mapping[str, Any]) -> Instance:
    """Reads the JSON form.

    Raises:
        ConfigError: a key is missing, or its value cannot be.
    """
    try:
        instance = _read(data)
    except KeyError as error:
        raise ConfigError(f"the instance has no key {error}", hint="The keys are in lab/world/instance.py.") from error
    except (TypeError, ValueError, IndexError, ManifestError) as error:
        raise ConfigError(f"the instance has a value that cannot be: {error}") from error
    fault = _fault(instance)
    if fault is not None:
        raise ConfigError(f"the instance cannot be planned: {fault}")
    return instance


def _read(data: Mapping[str, Any]) -> Instance:
    count = int(data["nodes"])
    if not 1 <= count <= MAX_PEERS:
        raise ValueError(f"{count} nodes; 1 to {MAX_PEERS} can be simulated")
    peers = [peer_of(index) for index in range(count)]
    rows = data["message_seconds"]
    order = data["order"]
    costs = Costs(
        stages=tuple(tuple(peers[index] for index in stage) for stage in data["stages"]),
        forward_s=dict(zip(peers, map(float, data["forward_seconds"]), strict=True)),
        message_s={peer: dict(zip(peers, map(float, row), strict=True)) for peer, row in zip(peers, rows, strict=True)},
        slots=dict(zip(peers, map(int, data["slots"]), strict=True)),
        backward_factor=float(data["backward_factor"]),
        head_factor=float(data["head_factor"]),
        task_overhead_s=float(data["task_overhead_seconds"]),
    )
    rules = PathRules(
        len(costs.stages),
        int(data["stages_per_path"]),
        int(order["max_forward_jump"]),
        int(order["max_back_stops"]),
        int(order["max_back_distance"]),
        float(data.get("visit_ratio", 1.0)),
    )
    return Instance(str(data.get("name", "unnamed")), costs, rules, int(data["microbatches_per_data_node"]))


def _fault(instance: Instance) -> str | None:
    costs = instance.costs
    hosts = [peer for peers in costs.stages for peer in peers]
    if len(set(hosts)) != len(hosts):
        return "a peer serves two stages"
    if any(not peers for peers in costs.stages):
        return "a stage has no peer"
    if instance.microbatches < 1 or any(slots < 1 for slots in costs.slots.values()):
        return "every data node needs a microbatch, and every peer a slot"
    figures = [*costs.forward_s.values(), *(cost for row in costs.message_s.values() for cost in row.values())]
    figures += [costs.backward_factor, costs.head_factor, costs.task_overhead_s]
    if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
        return "a cost is negative or not finite"
    return None
