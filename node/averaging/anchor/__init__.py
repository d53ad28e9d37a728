"""The agreed state of a module: layout, hashes, memory, outer step."""
