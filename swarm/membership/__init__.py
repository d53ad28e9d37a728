"""Who is in the swarm, who may be given work, which module to host, whom to stay connected to."""
