"""The laboratory: emulated links, chaos, audit of logs, doctor, simulation. Only the entry point imports it."""
