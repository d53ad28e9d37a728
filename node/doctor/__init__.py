"""Checks of `skipstone doctor`."""
