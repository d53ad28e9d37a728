"""The vocabulary: ids, paths, versions, errors, announcements, messages. All that `protocol` may import of `swarm`."""
