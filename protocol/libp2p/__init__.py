"""The libp2p daemon and its streams, for the DHT's child process, the only one that imports hivemind."""
