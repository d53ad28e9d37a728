"""Network of one node: session in a run, membership, message dispatch, and queries by clients."""
