"""Shared types: ids, paths, versions, errors, announcements, messages. `protocol` imports nothing else of `swarm`."""
