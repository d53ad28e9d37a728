"""Threads and tasks; knows nothing of training."""
