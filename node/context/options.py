"""The options of a node: one table of annotated fields gives command line, environment and arguments."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from node.data.places import ToldPlaces
from node.model.moments import Allowance, MomentType
from node.network.reach_status import ReachMode
from protocol.identity.keys import Identity
from protocol.manifest.join_link import JoinLink
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.errors import ConfigError, IdentityError
from swarm.vocabulary.types import PeerId, Reasoned

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_MEGABYTE = 10**6


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Check:
    holds: Callable[[Any], bool]
    complaint: str


SOME = Check(lambda value: value >= 1, "must be at least 1, not {}")
PORT = Check(lambda value: 0 <= value <= 65_535, "must be from 0 to 65535, not {}")
POSITIVE = Check(lambda value: value > 0, "must be more than 0, not {}")
NOT_NEGATIVE = Check(lambda value: value >= 0, "must not be negative, but is {}")
MODULE = Check(
    lambda text: re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", text) is not None, "must be a stage or STAGE.EXPERT, not {}"
)
SIZE = Check(lambda text: parse_size(text) >= 0, NOT_NEGATIVE.complaint)


def variable(name: str) -> str:
    return f"SKIPSTONE_{name.upper().replace('-', '_')}"


def setting(name: str, help_text: str, off: str | None = None, **more: Any) -> Any:
    """The option `--name` and its variable; a switch with its opposite if `off` is given."""
    flag = f"--{name}" if off is None else f"--{name}/--{off}"
    return typer.Option(..., flag, **{"envvar": variable(name), "show_envvar": False, "help": help_text, **more})


TextPlace: Final[Any] = setting(
    "text", "Where the run's text lies here; a path in somebody else's manifest is not opened."
)
TokenizerPlace: Final[Any] = setting("tokenizer", "Where the run's tokenizer file lies here; likewise.")
AllowHub: Final[Any] = setting("allow-hub", "May fetch the run's text from the Hugging Face hub.")


def default_identity_path() -> Path:
    """`$SKIPSTONE_HOME/identity.key`, else `skipstone/identity.key` in the XDG data folder."""
    home = os.environ.get("SKIPSTONE_HOME")
    if home:
        return Path(home) / "identity.key"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "skipstone" / "identity.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """One node's settings. Without a link the node is the first of its run, without a manifest it asks peers for it."""

    link: JoinLink | None
    manifest_path: Path | None
    stage: Annotated[
        str | None,
        setting(
            "stage",
            "The stage to host, or one expert of it as 1.2 [default: the module that needs it most]",
            metavar="N|N.E",
        ),
        MODULE,
    ] = None
    moving: Annotated[
        bool | None, setting("move", "Change stages when needed [default: unless --stage is given]", off="stay")
    ] = None
    reads_text: Annotated[bool, setting("data", "May take stage 0, which reads the text.", off="no-data")] = True
    text: Annotated[Path | None, TextPlace] = None
    tokenizer: Annotated[Path | None, TokenizerPlace] = None
    model: Annotated[
        Path | None,
        setting("model", "Folder of the model that the run starts from; others get their part from it."),
    ] = None
    allow_hub: Annotated[bool, AllowHub] = False
    yes: Annotated[bool, setting("yes", "Join without being asked.")] = False
    identity_path: Annotated[Path, setting("identity", "The node's key file; made when it is not there.")] = field(
        default_factory=default_identity_path
    )
    # A node exists to be reached from other machines; TLS decides who may speak.
    listen: Annotated[str, setting("listen", "Local address to bind to.")] = "0.0.0.0"  # noqa: S104
    advertise: Annotated[str | None, setting("advertise", "Host that others reach this node at.")] = None
    """None: the address that this machine uses to reach others."""
    port: Annotated[int, setting("port", "Port of the node; 0 for any."), PORT] = 0
    dht_port: Annotated[int, setting("dht-port", "Port of its DHT; 0 for any."), PORT] = 0
    reach: Annotated[ReachMode, setting("reach", "auto asks the router for a port if need be.")] = ReachMode.AUTO
    relay_megabytes_per_hour: Annotated[
        int,
        setting(
            "serve-relay",
            "Carry so much in an hour for peers that cannot dial each other; 0 carries nothing.",
            metavar="MEGABYTES_PER_HOUR",
            min=0,
            max=10**9,  # more than any line carries
        ),
        NOT_NEGATIVE,
    ] = 0
    device: Annotated[str, setting("device", "cpu, cuda, cuda:N, mps or auto; or several, as cuda:0,cuda:1.")] = "auto"
    threads: Annotated[int | None, setting("threads", "CPU threads for computing."), SOME] = None
    slots: Annotated[int | None, setting("slots", "Microbatches held at a time."), SOME] = None
    window: Annotated[int | None, setting("window", "Microbatches a data node has under way."), SOME] = None
    memory: Annotated[str | None, setting("memory", "For kept graphs, such as 512MiB; 0 recomputes always."), SIZE] = (
        None
    )
    memory_limit: Annotated[
        str | None,
        setting("memory-limit", "Take a stage of no more, such as 8GB; of the GPU's memory where there is one."),
        SIZE,
    ] = None
    moments: Annotated[
        MomentType, setting("moments", "8bit keeps AdamW's in a quarter of the memory; averages with all others.")
    ] = MomentType.FLOAT32
    steps: Annotated[int | None, setting("steps", "A data node stops after so many steps."), SOME] = None
    checkpoint_dir: Annotated[Path | None, setting("checkpoint-dir", "Folder to save to, and to go on from.")] = None
    checkpoint_every_s: Annotated[float, setting("checkpoint-every", "Seconds between two saves."), POSITIVE] = 300.0
    log_dir: Annotated[Path | None, setting("log-dir", "Folder for the event log that `check` reads.")] = None
    link_file: Annotated[Path | None, setting("link-file", "File to write the link to that others join with.")] = None
    patience_s: Annotated[float, setting("patience", "Seconds to wait for the link's peers at the start.")] = 60.0
    as_json: Annotated[bool, setting("json", "One JSON object a line.")] = False
    stop_on_eof: Annotated[bool, setting("stop-on-eof", "Stop when standard input ends.", envvar=None)] = False
    log_level: Annotated[LogLevel, setting("log-level", "Of the log on standard error.")] = LogLevel.WARNING

    @property
    def slots_held(self) -> int:
        return self.slots or DEFAULT_SLOTS

    @property
    def allowance(self) -> Allowance:
        return Allowance(self.slots_held, self.moments)

    @property
    def asked_stage(self) -> int | None:
        return None if self.stage is None else int(self.stage.partition(".")[0])

    @property
    def asked_expert(self) -> int | None:
        _, _, expert = (self.stage or "").partition(".")
        return int(expert) if expert else None

    @property
    def may_move(self) -> bool:
        """By default a node moves unless it was told its stage."""
        return self.stage is None if self.moving is None else self.moving

    @property
    def told(self) -> ToldPlaces:
        beside = None if self.model is None else self.model / "tokenizer.json"
        return ToldPlaces(text=self.text, tokenizer=self.tokenizer or beside, hub=self.allow_hub)

    @property
    def relay_bytes_per_hour(self) -> int:
        return self.relay_megabytes_per_hour * _MEGABYTE

    @property
    def graph_bytes(self) -> int | None:
        return None if self.memory is None else parse_size(self.memory)

    @property
    def memory_limit_bytes(self) -> Reasoned[int] | None:
        return memory_limit_of(self.memory_limit)

    def __post_init__(self) -> None:
        if self.link is None and self.manifest_path is None:
            raise ConfigError("neither a join link nor a manifest was given")
        for name, (_, *checks) in SETTINGS.items():
            value = getattr(self, name)
            for check in checks:
                if value is not None and not check.holds(value):
                    raise ConfigError(f"{name} {check.complaint.format(value)}")

    def arguments(self) -> list[str]:
        """The command-line arguments after `skipstone join` of a node with these settings."""
        words = [str(self.link or self.manifest_path)]
        for row in dataclasses.fields(self):
            value = getattr(self, row.name)
            if row.name not in SETTINGS or value == row.default:
                continue
            on, _, off = SETTINGS[row.name][0].param_decls[0].partition("/")
            if isinstance(value, bool):
                words.append(on if value else off)
            else:
                words += [on, str(value.value if isinstance(value, enum.Enum) else value)]
        return words


SETTINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    name: hint.__metadata__
    for name, hint in typing.get_type_hints(NodeOptions, include_extras=True).items()
    if typing.get_origin(hint) is Annotated
}
"""The option of each field, and its check if it has one."""
VARIABLES: Final = frozenset([variable("link"), *(option.envvar for option, *_ in SETTINGS.values() if option.envvar)])


def parse_size(text: str) -> int:
    """The bytes in a text such as `1024`, `512MiB` or `2GB`; case does not matter. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size", hint="Write it as 512MiB or 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def memory_limit_of(text: str | None) -> Reasoned[int] | None:
    """The bytes of `--memory-limit` with their reason; None without one. Raises ConfigError."""
    return None if text is None else Reasoned(parse_size(text), f"under --memory-limit {text}")


def own_peer() -> PeerId | None:
    """The peer id of this machine's default key; None without a usable one."""
    try:
        return Identity.load(default_identity_path()).peer
    except IdentityError:
        return None


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without this process's settings."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}
