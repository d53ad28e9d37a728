"""What the planner needs of the manifest."""

from __future__ import annotations

from protocol.manifest import Manifest
from swarm.planner import PathRules


def path_rules(manifest: Manifest) -> PathRules:
    """The run's rules for paths."""
    return PathRules(manifest.stages.count, manifest.stages.visited_per_path)
