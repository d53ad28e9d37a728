"""Experts: the router, which tells from a document's first tokens which expert of each stage it goes to."""
