"""Rounds: how the replicas of a module average without a coordinator (DESIGN section 5). Pure decisions."""
