"""The checks of `skipstone doctor`. One module for a check or a few of a kind."""
