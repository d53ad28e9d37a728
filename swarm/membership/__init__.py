"""Membership: live peers, the module to host, moves between modules, and peers to stay connected to."""
