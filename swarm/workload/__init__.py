"""Workload: microbatches of equal cost, their cost for a peer, and the split between devices. Pure decisions."""
