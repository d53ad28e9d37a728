"""The choice of codecs for links and rounds."""
