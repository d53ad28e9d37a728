"""Experts: the routes of documents through a run whose stages have several modules each (DiPaCo, arXiv:2403.10616)."""
