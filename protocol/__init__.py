"""Identity, certificates, manifest, signed records, frames, gRPC transport, DHT."""

import os

# The node starts processes by fork and exec, without gRPC in between. gRPC's fork handlers would write a line about
# "other threads" to standard error each time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# gRPC's C++ core would log every failed handshake to standard error. Our own log reports these errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
