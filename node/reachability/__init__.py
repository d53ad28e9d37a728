"""Reachability of this node: tested by peers, and improved by the router if possible."""
