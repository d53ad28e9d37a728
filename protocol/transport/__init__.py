"""Links over gRPC with mutual TLS: dialling, handshake, send queues, limits, and what each link carries."""
