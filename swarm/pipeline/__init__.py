"""A microbatch at one peer: custody, failover, settlement of gradients, the window, and the compute queue."""
