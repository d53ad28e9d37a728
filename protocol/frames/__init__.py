"""Serialisation of messages, from what the vocabulary and link.proto declare."""
