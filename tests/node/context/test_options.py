"""Settings of a node that cannot work are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.context.options import NodeOptions, default_identity_path, parse_size
from swarm.vocabulary.errors import ConfigError

BASE = {"link": None, "manifest_path": Path("run.toml"), "identity_path": Path("key")}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"manifest_path": None}, "neither a join link nor a manifest"),
        ({"port": 65_536}, "port must be from 0 to 65535"),
        ({"dht_port": -1}, "dht_port must be"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"slots": 0}, "slots must be"),
        ({"window": -3}, "window must be"),
        ({"steps": 0}, "steps must be"),
        ({"stage": "-1"}, "stage must be a stage or STAGE.EXPERT"),
        ({"stage": "1."}, "stage must be a stage"),
        ({"memory": "-1"}, "is not a size"),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        NodeOptions(**(BASE | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1024", 1024), ("512MiB", 2**29), ("1.5 gib", 3 * 2**29), ("2GB", 2 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "5 parsecs", "1GiB2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_where_the_key_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_HOME", "/srv/skipstone")
    assert default_identity_path() == Path("/srv/skipstone/identity.key")
    monkeypatch.delenv("SKIPSTONE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_identity_path() == Path("/data/skipstone/identity.key")
