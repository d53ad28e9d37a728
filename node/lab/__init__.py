"""The laboratory: simulation. Only the entry point imports it."""
