"""The anchor of a module: layout, hashes, storage and outer step."""
