"""Faults on purpose: experiments in which a local swarm is killed, frozen, cut apart and starved, and a verdict on what
it made of that."""
