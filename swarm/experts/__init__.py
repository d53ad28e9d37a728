"""Experts: routes of documents through stages with several modules each (DiPaCo, arXiv:2403.10616)."""
