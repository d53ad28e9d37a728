"""Bytes: identity, certificates, manifest, signed records, frames, gRPC transport, DHT. Of `swarm` it imports the vocabulary only."""

import os

# The node starts processes with fork and exec only, and nothing of gRPC is used between the two. Without this, gRPC's fork handlers
# write a line about "other threads" to standard error for each of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
