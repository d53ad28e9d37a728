"""A run's page for the browser."""
