"""The default run of a first-time user: small enough for two CPU cores, large enough to see it learn.

It stands alone because commands and scenarios start from it, also where there is no local swarm.
"""

from __future__ import annotations

from protocol.manifest.manifest import Manifest, manifest_from_table


def default_manifest(seed: int, name: str = "stdlib-demo") -> Manifest:
    """The manifest of the default run: a byte-level model of Python's standard library in five stages, one a peer.

    The sizes were found by trying them with `solo`: the loss falls from 5.6 nats per byte to under 3 in 20 steps, 2.5
    in 100 and 2.0 in 300. A step is 2048 tokens, and one CPU core trains on about 10,000 a second. Staleness is 0, so a
    swarm computes what `solo` does.

    Hidden states and their gradients are compressed, to INT8 at most, on links that are too slow for them; on one
    machine none is.

    A round takes the plain mean (outer learning rate 1, no momentum): a replica that is alone is then left as it is,
    and in a run as short as this one momentum overshoots (docs/BENCHMARKS.md). Longer runs with several replicas a
    stage want the manifest's defaults.
    """
    return manifest_from_table(
        {
            "protocol": 2,
            "name": name,
            "seed": seed,
            "model": {
                "vocabulary": 257,
                "hidden": 128,
                "heads": 4,
                "kv_heads": 2,
                "feed_forward": 352,
                "sequence": 128,
                "attention": "documents",
            },
            "stages": {"blocks": [0, 1, 1, 1, 1]},
            "training": {
                "rows": 4,
                "inner_tokens": 2048,
                "inner_steps": 10,
                "outer": {"learning_rate": 1.0, "momentum": 0.0},
                "inner": {"learning_rate": 3e-3},
                "schedule": {"kind": "cosine", "warmup_tokens": 10 * 2048, "total_tokens": 300 * 2048},
            },
            "codecs": {"activations": "int8", "gradients": "int8"},
        }
    )
