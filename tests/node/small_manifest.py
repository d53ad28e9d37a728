"""A manifest small enough that a test may train it."""

from typing import Any

from protocol.manifest.manifest import Manifest, manifest_from_table


def small_manifest(**changes: Any) -> Manifest:
    """Two groups of query heads, three stages. A key of `changes` is `section__key`, or `seed`."""
    table: dict[str, Any] = {
        "protocol": 2,
        "name": "small",
        "seed": 3,
        "model": {"vocabulary": 257, "hidden": 16, "heads": 4, "kv_heads": 2, "feed_forward": 24, "sequence": 16},
        "stages": {"blocks": [1, 2, 1]},
        "data": {"held_out": 0.2},
        "training": {
            "rows": 2,
            "inner_tokens": 64,
            "staleness_steps": 0,
            "schedule": {"kind": "linear", "warmup_steps": 2, "total_steps": 100},
        },
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (table[section] if section else table)[name] = value
    return manifest_from_table(table)
