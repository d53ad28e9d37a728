"""Training in a single process, as the baseline for a swarm."""
