"""Checkpoints: a folder with the run's manifest, and for every peer its newest two snapshots.

    manifest.toml                    the run's manifest, signed
    <peer id>/state-7.safetensors    a replica's tensors: parameters, optimizer, anchor
    <peer id>/state-7.json           its counters, the size and BLAKE3 of the other file, and a BLAKE3 over all that
    <peer id>/state-6.safetensors    the one before
    <peer id>/state-6.json

No two processes write the same file, so several peers may share a folder. A snapshot exists when its json does: that is
renamed into place last, after everything else is known to be on the disk. Whatever moment a machine dies at, the
snapshot before is whole. Gradients that are accumulated but not yet applied are not saved: they are at most one inner
step's work, and the data position that is saved lies before their texts, so these are read again. Never pickle.
"""
