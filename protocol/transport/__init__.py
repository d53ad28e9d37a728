"""Links over gRPC with mutual TLS: dialling, handshake, send queue, limits, and measurements."""
