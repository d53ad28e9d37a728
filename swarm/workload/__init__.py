"""Workload: packing into microbatches of equal cost, cost of a visit, and the split between devices."""
