"""Reads whole models from checkpoints, swarms and exports, and exports them as Hugging Face folders."""
