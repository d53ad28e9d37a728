"""The single-process baseline."""
