"""The model: blocks, embedding and head, their passes, inference, and the inner optimizers."""
