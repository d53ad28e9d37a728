"""Threads, tasks and the runner of state machines; independent of training."""
