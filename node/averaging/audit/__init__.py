"""Audits of committed rounds among their members."""
