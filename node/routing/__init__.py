"""The data node's side of paths: launches microbatches, negotiates lanes, evaluates."""
