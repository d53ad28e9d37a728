"""Choice of tensor codecs (compression) for links and averaging rounds."""
