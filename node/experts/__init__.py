"""Experts: a router chooses one expert per stage from a document's first tokens."""
