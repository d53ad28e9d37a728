"""Interfaces of transport, directory and clock."""
