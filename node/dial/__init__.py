"""Choice of all settings of a run from the model's size, each with a reason, and a forecast. Does no I/O."""
