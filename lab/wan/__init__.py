"""Experiments on an emulated wide area network: what a swarm behind slow, far or faulty links makes of its compute, as
figures, a report and plots.
"""
