"""Swarms in virtual time that run the node's own decision code. Pure and seeded."""
