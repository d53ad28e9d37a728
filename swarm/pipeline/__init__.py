"""Microbatches at one peer: custody, failover, which gradients count, number in flight, and the compute queue."""
