"""The definition of a run, its signature, and the join link."""
