"""The dial: every choice of a run from its size alone, each with its reason, and a forecast. Pure."""
