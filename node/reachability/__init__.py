"""Reachability of this node: tested with other peers' help, and improved through the router where it allows."""
