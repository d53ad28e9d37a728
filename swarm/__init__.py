"""Decision logic without IO: membership, placement, paths, rounds. Imports only the standard library, not asyncio."""
