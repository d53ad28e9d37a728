"""The process: command line, runtime, model, data and network."""
