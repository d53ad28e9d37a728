"""The life of a microbatch at one peer: custody, forward, backward, failover, settlement of gradients."""
