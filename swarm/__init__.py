"""Decisions, with no IO: vocabulary, membership, paths, placement. Imports neither torch, grpc, hivemind nor
asyncio."""
