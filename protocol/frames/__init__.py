"""Messages to bytes and back, by what the vocabulary and link.proto declare."""
