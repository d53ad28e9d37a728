"""What the node needs of transport, directory and clock, and what they need of it."""
