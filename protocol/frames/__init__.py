"""Encoding of messages between peers, derived from the types in `swarm.vocabulary` and link.proto."""
