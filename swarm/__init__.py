"""Decisions, with no IO: vocabulary, membership, paths, placement, rounds. Imports neither torch, grpc, hivemind nor
asyncio.
"""
