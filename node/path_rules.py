"""What the planner needs of the manifest."""

from __future__ import annotations

from protocol.manifest import Manifest
from swarm.paths.rules import PathRules

STEPS_BACK = 2
"""That a path may take under `reordering = "adjacent"`, each to the stage just before the highest visited; as in SkipPipe's schedules
(arXiv 2502.19913)."""


def path_rules(manifest: Manifest) -> PathRules:
    """The run's rules for paths."""
    stages = manifest.stages
    back = STEPS_BACK if stages.reordering == "adjacent" else 0
    return PathRules(stages.count, stages.visited_per_path, max_back_stops=back, max_back_distance=back)
