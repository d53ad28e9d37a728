"""What every part is given: options, and the module that it is about."""
