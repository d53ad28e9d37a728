"""The libp2p daemon and its streams, in the DHT's child process, where alone hivemind is imported."""
