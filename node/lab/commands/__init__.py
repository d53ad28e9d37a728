"""The command simulate."""
