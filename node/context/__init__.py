"""Options of a node, and the context that the parts of a module share."""
