"""Runs microbatches at a node: admission, tensors, computation, codecs and sending."""
