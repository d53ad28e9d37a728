"""The seams between node, transport, directory and clock."""
