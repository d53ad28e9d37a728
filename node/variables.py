"""Environment variables that stand for the options of a node: how services and containers are told what others type.

The variable of `--dht-port` is `SKIPSTONE_DHT_PORT`, and so on. What is typed comes first. A variable that is there but empty counts as
none, because compose files hand variables on whether they are set or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SETTINGS: Final = (
    "link",
    "stage",
    "move",
    "data",
    "text",
    "tokenizer",
    "allow-hub",
    "yes",
    "identity",
    "listen",
    "advertise",
    "port",
    "dht-port",
    "reach",
    "serve-relay",
    "device",
    "threads",
    "slots",
    "window",
    "memory",
    "steps",
    "checkpoint-dir",
    "checkpoint-every",
    "log-dir",
    "link-file",
    "patience",
    "json",
    "log-level",
)
"""What a variable can say: every option of `skipstone join` but `--stop-on-eof`, and the link."""


def variable(setting: str) -> str:
    """The name of the variable for one of `SETTINGS`."""
    assert setting in SETTINGS, setting
    return f"SKIPSTONE_{setting.upper().replace('-', '_')}"


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for nodes that are told everything on their command lines: what this process was told is not for them."""
    own = {variable(setting) for setting in SETTINGS}
    return {name: value for name, value in environment.items() if name not in own}
