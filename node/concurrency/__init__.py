"""Threads, tasks and the event loop of state machines; independent of training."""
