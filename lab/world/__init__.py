"""Deterministic simulation of swarms in virtual time, which runs the node's own decision code."""
