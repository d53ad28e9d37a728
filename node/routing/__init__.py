"""A data node's side of paths: launching, evaluation and the window."""
