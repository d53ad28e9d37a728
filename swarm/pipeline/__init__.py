"""One microbatch at one peer: custody, forward, backward, failover, which gradients count."""
