"""Path choice: legal orders of stages, stage prices, measured times, search for the cheapest route. Without IO."""
