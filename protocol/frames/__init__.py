"""Serialisation of messages, derived from the vocabulary's types and link.proto."""
