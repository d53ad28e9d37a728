"""Checkpoints: a folder with the run's manifest, and for every peer its newest two snapshots.

    manifest.toml                    the run's manifest, signed
    <peer id>/state-7.safetensors    a replica's tensors: parameters, optimizer, anchor
    <peer id>/state-7.json           its counters, size and BLAKE3 of the other file, and a BLAKE3 over all that

No two processes write the same file, so peers may share a folder. The json is renamed into place last and makes the
snapshot exist. Unapplied gradients are not saved: the saved data position lies before their texts.
"""
