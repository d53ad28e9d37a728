"""What an adversary can do to a swarm, and what stops it: docs/security.md."""
