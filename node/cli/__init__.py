"""The command line. Its modules import nothing heavy when loaded, so that a command's first line appears at once."""
