"""The vocabulary as types: ids, paths, versions, errors, announcements, the messages of each vertical. All that
`protocol` may import of `swarm`.
"""
