"""One node from start to end: roles, serving, moving and leaving."""
