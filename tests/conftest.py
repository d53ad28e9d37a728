"""Settings of all tests."""

import os

# Before anything imports torch: with a thread for each core, every operator waits at a barrier for a thread that a busy
# neighbour has put aside, and seconds become minutes (5 s and 91 s beside three busy processes).
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# How long one example takes says something about the machine and its load, not about the code.
settings.register_profile("skipstone", deadline=None, max_examples=50)
settings.load_profile("skipstone")
