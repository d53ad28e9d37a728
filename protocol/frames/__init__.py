"""Messages to bytes and back, one module for each vertical."""
