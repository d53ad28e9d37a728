"""Turns text into microbatches: sources, tokenizers, order and split of documents, packing."""
