"""Choice of codecs for links and rounds."""
