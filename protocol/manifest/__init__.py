"""The manifest that defines a run, its signature, and the join link."""
