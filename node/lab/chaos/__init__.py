"""Faults on purpose: scenarios in which a local swarm is killed, frozen, cut apart and starved, and a verdict on what
it made of that.

The swarm and its network are those of `node.lab.wan.laboratory`. `plan` reads a scenario, `deeds` has what can be done
beside the laboratory's own repertoire, `trial` carries a scenario out while `watch` looks on, `recovery` and `verdict`
judge, `report` tells.
"""
