"""A wide area network on one machine: what a swarm behind slow, far or faulty links makes of its compute, as figures, a
report and plots."""
