"""Bytes: identity, certificates, manifest, signed records, frames, gRPC transport, DHT."""

import os

# The node starts processes with fork and exec only, and nothing of gRPC is used between the two. Without this, gRPC's
# fork handlers
# write a line about "other threads" to standard error for each of them.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Every failed handshake would be a line of C++ log on standard error; what matters of it reaches our own log as an
# error with a name.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
