"""A swarm of processes on this machine, and its progress."""
