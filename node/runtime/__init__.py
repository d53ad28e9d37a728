"""One node from start to end: chooses a module, serves it, moves and leaves."""
