"""Typed events, their log, status, throughput and failpoints."""
