"""The context of every part: options, and the module that it is about."""
