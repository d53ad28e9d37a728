"""The dial: every choice of a run from its size, each with a reason, and a forecast. Pure."""
