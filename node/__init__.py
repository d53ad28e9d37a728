"""A node of a swarm: command line, runtime, model, data and network."""
