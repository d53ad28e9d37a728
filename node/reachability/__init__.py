"""Reachability of this node: tested by peers, and improved by port mappings, reverse calls and relays."""
