"""What documents are read from: the files at a place, their lines, tokens that were made before, data sets of the hub."""
