"""Typed events, their log, throughput, failpoints."""
