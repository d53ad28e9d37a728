"""Whole models out of a run: where their modules come from, and the Hugging Face folder they are written to."""
