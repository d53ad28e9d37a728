"""Experiments in a checkout: emulated links, WAN and chaos scenarios, audit of logs."""
