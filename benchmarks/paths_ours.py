"""Our plans in `benchmarks.paths`: what data nodes arrive at by talking, and what they do before they have heard of
each other."""

from __future__ import annotations

import time
from dataclasses import replace

from swarm.routing.path_rules import PathRules
from swarm.simulation.instance import Instance, Plan
from swarm.simulation.iteration import Conduct, Iteration, run_iterations


def talked(instance: Instance) -> Iteration:
    """The first iteration after the usual talk, with the CPU time that it took all data nodes."""
    return run_iterations(instance, Conduct(), time.process_time)[0]


def talked_plan(instance: Instance, rules: PathRules) -> Plan:
    """The plan by other rules than the instance's."""
    return talked(replace(instance, rules=rules)).plan


def cold_plan(instance: Instance) -> Plan:
    """Without a word between the data nodes."""
    return run_iterations(instance, Conduct(cold=True), time.process_time)[0].plan
