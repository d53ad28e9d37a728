"""Rounds: averaging the replicas of a module without a coordinator. Pure decisions."""
