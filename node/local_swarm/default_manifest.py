"""Manifest of the default run: small enough for two CPU cores, large enough to see it learn."""

from protocol.manifest.manifest import Manifest, manifest_from_table


def default_manifest(seed: int, name: str = "stdlib-demo") -> Manifest:
    """Returns a demo in five stages that learns Python's standard library."""
    model = {"vocabulary": 257, "hidden": 128, "heads": 4, "kv_heads": 2, "feed_forward": 352, "sequence": 128}
    outer, inner = {"learning_rate": 1.0, "momentum": 0.0}, {"name": "muon", "learning_rate": 6e-3}
    schedule = {"kind": "cosine", "warmup_tokens": 10 * 2048, "total_tokens": 300 * 2048}
    rounds = {"rows": 4, "inner_tokens": 2048, "inner_steps": 10, "outer": outer, "inner": inner}
    return manifest_from_table(
        {"protocol": 2, "name": name, "seed": seed}
        | {"model": model | {"attention": "documents"}, "stages": {"blocks": [0, 1, 1, 1, 1]}}
        | {"training": rounds | {"schedule": schedule}, "codecs": {"activations": "int8", "gradients": "int8"}}
    )
