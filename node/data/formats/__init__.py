"""What documents are read from: files at a place, their lines, tokens that were made before, data sets of the hub."""
