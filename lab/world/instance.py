"""Path-planning problems: peers, stages, costs and rules.

JSON keys: `name`, `nodes`, `stages` (peers of each stage, stage 0 first), `forward_seconds[p]`, `backward_factor`,
`head_factor`, `task_overhead_seconds`, `message_seconds[p][q]`, `slots[p]`, `stages_per_path`, `order`
(`max_forward_jump`, `max_back_stops`, `max_back_distance`), `microbatches_per_data_node`, optional `visit_ratio`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.routing.measured_times import Costs
from swarm.routing.path_rules import PathRules
from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import PeerId

MAX_PEERS = 20_000
_DIGITS = 5


@dataclass(frozen=True, slots=True)
class Instance:
    """A path-planning problem.

    Args:
        stages: peers of each stage, data nodes first.
        microbatches: microbatches per data node and step.
        head_factor: time of head and loss on a data node, in its forward times.
    """

    name: str
    stages: tuple[tuple[PeerId, ...], ...]
    costs: Costs
    rules: PathRules
    microbatches: int
    head_factor: float = 0.25


def peer_of(index: int) -> PeerId:
    """Returns the peer id of the peer with this index. Peer ids sort like indices."""
    return PeerId(f"{index:0{_DIGITS}d}")


def from_json(data: Mapping[str, Any]) -> Instance:
    """Builds a path-planning problem from JSON values. Raises ConfigError if a key is missing or a value is invalid."""
    try:
        instance = _read(data)
    except KeyError as error:
        raise ConfigError(f"the instance has no key {error}", hint="The keys are in lab/world/instance.py.") from error
    except (TypeError, ValueError, IndexError, ManifestError) as error:
        raise ConfigError(f"the instance has an invalid value: {error}") from error
    fault = _fault(instance)
    if fault is not None:
        raise ConfigError(f"the instance cannot be planned: {fault}")
    return instance


def _read(data: Mapping[str, Any]) -> Instance:
    count = int(data["nodes"])
    if not 1 <= count <= MAX_PEERS:
        raise ValueError(f"{count} nodes; 1 to {MAX_PEERS} can be simulated")
    peers = [peer_of(index) for index in range(count)]
    stages = tuple(tuple(peers[index] for index in stage) for stage in data["stages"])
    rows, order = data["message_seconds"], data["order"]
    costs = Costs(
        forward_s=dict(zip(peers, map(float, data["forward_seconds"]), strict=True)),
        message_s={peer: dict(zip(peers, map(float, row), strict=True)) for peer, row in zip(peers, rows, strict=True)},
        slots=dict(zip(peers, map(int, data["slots"]), strict=True)),
        backward_factor=float(data["backward_factor"]),
        task_overhead_s=float(data["task_overhead_seconds"]),
    )
    rules = PathRules(
        len(stages),
        int(data["stages_per_path"]),
        int(order["max_forward_jump"]),
        int(order["max_back_stops"]),
        int(order["max_back_distance"]),
        float(data.get("visit_ratio", 1.0)),
    )
    name, microbatches = str(data.get("name", "unnamed")), int(data["microbatches_per_data_node"])
    return Instance(name, stages, costs, rules, microbatches, float(data["head_factor"]))


def _fault(instance: Instance) -> str | None:
    costs = instance.costs
    hosts = [peer for peers in instance.stages for peer in peers]
    if len(set(hosts)) != len(hosts):
        return "a peer serves two stages"
    if any(not peers for peers in instance.stages):
        return "a stage has no peer"
    if instance.microbatches < 1 or any(slots < 1 for slots in costs.slots.values()):
        return "every data node needs a microbatch, and every peer a slot"
    figures = [*costs.forward_s.values(), *(cost for row in costs.message_s.values() for cost in row.values())]
    figures += [costs.backward_factor, instance.head_factor, costs.task_overhead_s]
    if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
        return "a cost is negative or not finite"
    return None
