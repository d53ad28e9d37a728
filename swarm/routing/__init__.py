"""Path choice: legal orders of stages, prices, measured times and the search for the cheapest route. Pure."""
