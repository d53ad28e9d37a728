"""How data nodes agree on lanes: each with its own book, by messages that take time and get lost. Pure."""
