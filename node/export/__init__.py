"""Reading of whole models from their sources, and their export as Hugging Face folders."""
