"""The commands wan, chaos, check, doctor and simulate."""
