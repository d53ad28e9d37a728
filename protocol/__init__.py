"""Bytes: identity, certificates, manifest, signed records, frames, gRPC transport, DHT. Of `swarm` it imports the vocabulary only."""
