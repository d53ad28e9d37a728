"""The start of a run from an existing model: its folder, checked and cut into modules."""
