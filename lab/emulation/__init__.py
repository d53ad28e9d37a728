"""The emulated network: links with latency, rate limits and faults for processes on one machine."""
