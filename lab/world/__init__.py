"""Swarms in virtual time, made of the very machines that the node runs. Pure and seeded."""
