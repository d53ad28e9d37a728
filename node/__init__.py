"""The process: command line, configuration, stages, model, data, metrics."""
