"""Chaos experiments: a local swarm is killed, frozen, cut apart and starved, and judged by what it made of that."""
