"""Text into microbatches: sources, tokenizers, the order and split of documents, packing."""
