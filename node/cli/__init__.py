"""The command line. Modules here import nothing heavy when they are loaded, so that the first line appears at once."""
