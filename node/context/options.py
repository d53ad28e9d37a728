"""What one node is told on its command line, checked as far as it can be without the run's manifest.

Environment variables that stand for the options of a node: how services and containers are told what others type.

The variable of `--dht-port` is `SKIPSTONE_DHT_PORT`, and so on. What is typed comes first. A variable that is there but
empty counts as none, because compose files hand variables on whether they are set or not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.data.places import NOTHING_TOLD, ToldPlaces
from node.network.reach_status import ReachMode
from protocol.identity.keys import Identity
from protocol.manifest.join_link import JoinLink
from swarm.pipeline.ledger import DEFAULT_SLOTS
from swarm.vocabulary.errors import ConfigError, IdentityError
from swarm.vocabulary.types import PeerId

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """One node's settings. Everything that all peers must agree on is in the manifest instead.

    At least one of `link` and `manifest_path` is given. With a link alone the manifest is fetched from the peers it
    names; with a manifest alone the node is the first of its run.
    """

    link: JoinLink | None
    manifest_path: Path | None
    """A signed manifest."""
    identity_path: Path
    """The node's key file; made when it is not there."""
    stage: int | None = None
    """The stage to host; None to take the one that needs a peer most."""
    moving: bool | None = None
    """Whether it may change its module when the swarm needs it elsewhere; None: unless `stage` is given."""
    reads_text: bool = True
    """Whether it may choose stage 0, whose peers read the run's text."""
    told: ToldPlaces = NOTHING_TOLD
    """What the person says about the run's text; it decides too whether the node may choose stage 0."""
    listen: str = "0.0.0.0"  # noqa: S104 - a node exists to be reached from other machines; TLS decides who may speak
    """The local address that the gRPC server and the DHT bind to."""
    advertise: str | None = None
    """The host name or address that other peers are told; None for the one this machine uses to reach them."""
    port: int = 0
    """Of the gRPC server; 0 for any free one."""
    dht_port: int = 0
    """Of the DHT; 0 for any free one."""
    reach: ReachMode = ReachMode.AUTO
    relay_bytes_per_hour: int = 0
    """What it carries in any hour for peers that cannot dial each other; 0: it does not."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:N`, `mps`, or `auto` for the best there is."""
    threads: int | None = None
    """CPU threads of the compute device; None leaves it to torch."""
    slots: int | None = None
    """Microbatches a stage holds at a time; None for the node's default."""
    window: int | None = None
    """Microbatches that a data node has under way at a time; None for the node's default."""
    memory: int | None = None
    """Bytes that kept autograd graphs may take; 0 recomputes always, None for the node's default."""
    steps: int | None = None
    """A data node stops in good order after this many steps of its own; other nodes ignore it. None: until asked."""
    checkpoint_dir: Path | None = None
    """Folder that the node saves its state to, and goes on from if it finds its own there."""
    checkpoint_every_s: float = 300.0
    """Seconds between two saves."""
    log_dir: Path | None = None
    """Folder that gets the node's event log; None for no log."""
    patience_s: float = 60.0
    """How long the peers named by the link may be out of reach at the start before the node gives up."""

    @property
    def slots_held(self) -> int:
        """Microbatches that it holds at a time."""
        return self.slots or DEFAULT_SLOTS

    @property
    def may_move(self) -> bool:
        """A node that was told its stage keeps it, if not told otherwise."""
        return self.stage is None if self.moving is None else self.moving

    def __post_init__(self) -> None:
        if self.link is None and self.manifest_path is None:
            raise ConfigError("neither a join link nor a manifest was given")
        for name in ("port", "dht_port"):
            if not 0 <= getattr(self, name) <= 65_535:
                raise ConfigError(f"{name} must be from 0 to 65535, not {getattr(self, name)}")
        for name in ("threads", "slots", "window", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not self.checkpoint_every_s > 0:
            raise ConfigError(f"checkpoint_every_s must be more than 0, not {self.checkpoint_every_s}")
        if self.relay_bytes_per_hour < 0:
            raise ConfigError(f"relay_bytes_per_hour must not be negative, but is {self.relay_bytes_per_hour}")
        if self.stage is not None and self.stage < 0:
            raise ConfigError(f"stage must not be negative, but is {self.stage}")
        if self.memory is not None and self.memory < 0:
            raise ConfigError(f"memory must not be negative, but is {self.memory}")


def parse_size(text: str) -> int:
    """Bytes from `1024`, `512MiB` or `2GB`; case does not matter.

    Raises:
        ConfigError: not a whole or decimal number with one of the known units.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size", hint="Write it as 512MiB or 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def own_peer() -> PeerId | None:
    """Who this machine is by its default key; None when it has none, or none that can be used."""
    try:
        return Identity.load(default_identity_path()).peer
    except IdentityError:
        return None


def default_identity_path() -> Path:
    """`$SKIPSTONE_HOME/identity.key`, else `skipstone/identity.key` in the XDG data folder."""
    home = os.environ.get("SKIPSTONE_HOME")
    if home:
        return Path(home) / "identity.key"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "skipstone" / "identity.key"


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
    """The environment for nodes that are told everything on their command lines: what this process was told is not for
    them."""
    own = {variable(setting) for setting in SETTINGS}
    return {name: value for name, value in environment.items() if name not in own}
