"""The commands wan, chaos and check."""
