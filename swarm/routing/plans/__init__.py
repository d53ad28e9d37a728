"""Plans of all data nodes' microbatches: exact forecasts of them, and the search for better ones."""
