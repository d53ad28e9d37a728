"""Reading and export of whole models: where a run's modules come from, and the Hugging Face folder they are
written to.
"""
