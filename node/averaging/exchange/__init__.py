"""The all-reduce of one attempt: pseudo-gradients, partition, pieces, reducer, comparison."""
