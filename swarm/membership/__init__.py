"""Membership and placement: the live peers, which module to host, whom to stay connected to."""
