"""Rounds of one replica: anchor, exchange, downloads, audits."""
