"""Swarms in virtual time, driven by the very planner that the node runs. Pure and seeded."""
