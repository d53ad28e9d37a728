"""The runtime of one node, from its start to its end: roles, serving, moving, leaving."""
