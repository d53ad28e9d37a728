"""Work of a data node: launches of microbatches, held-out evaluation, and the limit of microbatches in flight."""
