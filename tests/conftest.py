"""Settings of all tests."""

from hypothesis import settings

# How long one example takes says something about the machine and its load, not about the code.
settings.register_profile("skipstone", deadline=None)
settings.load_profile("skipstone")
