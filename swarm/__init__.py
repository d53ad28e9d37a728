"""Decisions without IO: membership, placement, paths, rounds. Imports only the standard library, without asyncio."""
