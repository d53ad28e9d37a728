"""Checkpoints: a folder with the run's manifest and the two newest snapshots of every peer.

    manifest.toml                    the run's signed manifest
    <peer id>/state-7.safetensors    a replica's tensors: parameters, optimizer, anchor
    <peer id>/state-7.json           its counters, size and BLAKE3 of the tensors, and a BLAKE3 of the json itself

Each process writes files of its own, so peers can share a folder. The json is renamed into place last. Unapplied
gradients are not saved: the saved data position lets a resumed node read their texts again.
"""
