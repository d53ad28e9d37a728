"""The libp2p daemon and its streams. It imports hivemind and lives in the child process."""
