"""Averaging of one replica with the other replicas of its module: anchor, rounds, downloads, audits."""
