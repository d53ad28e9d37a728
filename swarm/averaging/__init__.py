"""Rounds: replicas of a module average their parameters without a coordinator. State machines without IO."""
