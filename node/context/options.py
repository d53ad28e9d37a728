"""The options of a node: one table of annotated fields gives command line, environment and arguments."""

import dataclasses
import enum
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.data.local_paths import LocalPathOptions
from node.model.moments import DEFAULT_SLOTS, Allowance, MomentType
from node.network.reach_status import ReachMode
from protocol.transport.settings import joined
from swarm.vocabulary.errors import ConfigError, IdentityError
from swarm.vocabulary.types import PeerId, Reasoned

if TYPE_CHECKING:
    from protocol.identity.invitations import Grant
    from protocol.manifest.join_link import Link

# Binary units have an `i`, as in MiB.
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_MEGABYTE = 10**6
MOST_HOSTED: Final = 64  # Modules of one node


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Check:
    """A predicate on the value of an option, and the message if it fails."""

    holds: Callable[[Any], bool]
    complaint: str


def _is_dialable(host: str) -> bool:
    from protocol.identity.signed_records import is_address

    return is_address(joined(host, 65_535))


SOME = Check(lambda value: value >= 1, "must be at least 1, not {}")
PORT = Check(lambda value: 0 <= value <= 65_535, "must be from 0 to 65535, not {}")
POSITIVE = Check(lambda value: value > 0, "must be more than 0, not {}")
NOT_NEGATIVE = Check(lambda value: value >= 0, "must not be negative, but is {}")
MODULE = Check(
    lambda text: re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", text) is not None, "must be a stage or STAGE.EXPERT, not {}"
)
STAGES = Check(
    lambda text: bool(parse_stages(text)), "must be stages as 2-4 or 0,3, each once and at most 64 of them, not {}"
)
ADVERTISE = Check(
    lambda host: not host or _is_dialable(host),
    "must be a host name or an IP address that peers can dial, without a port (--port sets it), not {}",
)
NAME = Check(lambda name: len(name) <= 32, "must have at most 32 characters, not {}")
SIZE = Check(lambda text: parse_size(text) >= 0, NOT_NEGATIVE.complaint)


def variable(name: str) -> str:
    """Returns the environment variable of an option."""
    return f"SKIPSTONE_{name.upper().replace('-', '_')}"


def setting(name: str, help_text: str, off: str | None = None, **more: Any) -> Any:
    """Declares the option `--name` with its environment variable; with `off`, a switch `--name/--off`."""
    flag = f"--{name}" if off is None else f"--{name}/--{off}"
    return typer.Option(..., flag, **{"envvar": variable(name), "show_envvar": False, "help": help_text, **more})


# A path in another author's manifest is never opened: only these options grant access.
TextPath: Final[Any] = setting("text", "Local copy of the run's text; needed to read another author's run.")
TokenizerPath: Final[Any] = setting("tokenizer", "Local copy of the run's tokenizer.json.")
AllowHub: Final[Any] = setting("allow-hub", "Allow fetching the run's text from the Hugging Face hub.")


def default_identity_path() -> Path:
    """Returns `$SKIPSTONE_HOME/identity.key`, else `skipstone/identity.key` in the XDG data folder."""
    home = os.environ.get("SKIPSTONE_HOME")
    if home:
        return Path(home) / "identity.key"
    try:
        data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    except RuntimeError:  # a user without HOME and without an entry in the password file
        raise ConfigError(
            "there is no folder for this node's key: HOME is not set, and the user has no home folder",
            hint="Name the key file with --identity, or set SKIPSTONE_HOME or HOME.",
        ) from None
    return data / "skipstone" / "identity.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """One node's options. Without a link it is the run's first node; without a manifest it asks peers for one."""

    link: "Link | None"
    manifest_path: Path | None
    stage: Annotated[str | None, setting("stage", "Stage or expert to host", metavar="N|N.E"), MODULE] = None
    stages: Annotated[str | None, setting("stages", "Stages to host, as 2-4 or 0,3", metavar="N-N|N,N"), STAGES] = None
    modules: Annotated[int | None, setting("modules", "Most modules; beyond one, those without a peer."), SOME] = None
    moving: Annotated[bool | None, setting("move", "Change stages [default: without --stage]", off="stay")] = None
    reads_text: Annotated[bool, setting("data", "Whether to host stage 0 and read the text.", off="no-data")] = True
    invitation: Annotated[str | None, setting("invitation", "Invitation to host stage 0", metavar="TEXT|FILE")] = None
    text: Annotated[Path | None, TextPath] = None
    tokenizer: Annotated[Path | None, TokenizerPath] = None
    model: Annotated[Path | None, setting("model", "Folder of the model that the run starts from.")] = None
    allow_hub: Annotated[bool, AllowHub] = False
    yes: Annotated[bool, setting("yes", "Join without asking for consent.")] = False
    identity_path: Annotated[Path, setting("identity", "Key file of the node [default: this machine's key]")] = field(
        default_factory=default_identity_path
    )
    name: Annotated[str, setting("name", "Your name on the run's page, which everybody sees."), NAME] = ""
    # Other machines must reach a node; mutual TLS authenticates them.
    listen: Annotated[str, setting("listen", "Local address to bind to; :: is IPv6 and IPv4.")] = "0.0.0.0"  # noqa: S104
    advertise: Annotated[str | None, setting("advertise", "Host that peers dial [default: detected]"), ADVERTISE] = None
    port: Annotated[int, setting("port", "Port of the node (0: a free one, the same at each start)."), PORT] = 0
    dht_port: Annotated[int, setting("dht-port", "Port of the DHT (0: a free one, the same at each start)."), PORT] = 0
    reach: Annotated[ReachMode, setting("reach", "auto asks the router to open a port if needed.")] = ReachMode.AUTO
    relay_megabytes_per_hour: Annotated[
        int, setting("serve-relay", "MB an hour relayed for peers behind NAT.", min=0, max=10**9), NOT_NEGATIVE
    ] = 0
    device: Annotated[str, setting("device", "cpu, cuda, cuda:N, mps, auto, or several as cuda:0,cuda:1.")] = "auto"
    threads: Annotated[int | None, setting("threads", "CPU threads at most [default: all]"), SOME] = None
    slots: Annotated[int | None, setting("slots", f"Microbatches held [default: {DEFAULT_SLOTS}]"), SOME] = None
    window: Annotated[int | None, setting("window", "Microbatches in flight [default: measured]"), SOME] = None
    memory: Annotated[
        str | None, setting("memory", "Memory of activations, as 512MiB; 0 recomputes [default: a share]"), SIZE
    ] = None
    memory_limit: Annotated[
        str | None, setting("memory-limit", "Memory of a stage, as 8GB: of the GPU, if any [default: all free]"), SIZE
    ] = None
    moments: Annotated[MomentType, setting("moments", "AdamW's moments; 8bit takes a quarter.")] = MomentType.FLOAT32
    steps: Annotated[int | None, setting("steps", "Inner steps until a data node stops [default: never]"), SOME] = None
    checkpoint_dir: Annotated[Path | None, setting("checkpoint-dir", "Folder to save to and resume from.")] = None
    checkpoint_every_s: Annotated[float, setting("checkpoint-every", "Seconds between checkpoints."), POSITIVE] = 300.0
    log_dir: Annotated[Path | None, setting("log-dir", "Folder for the event log of `check` [default: none]")] = None
    link_file: Annotated[Path | None, setting("link-file", "File that holds this node's link [default: none]")] = None
    dashboard: Annotated[int | None, setting("dashboard", "Show the run at this port", metavar="[PORT]"), PORT] = None
    settings: Annotated[Path | None, setting("settings", "File of `skipstone limits` [default: this user's]")] = None
    patience_s: Annotated[float, setting("patience", "Seconds to wait for the link's peers at the start.")] = 60.0
    as_json: Annotated[bool, setting("json", "Print one JSON object per line.")] = False
    stop_on_eof: Annotated[bool, setting("stop-on-eof", "Stop when standard input ends.", envvar=None)] = False
    log_level: Annotated[LogLevel, setting("log-level", "Level of the log on standard error.")] = LogLevel.WARNING

    @property
    def slots_held(self) -> int:
        return self.slots or DEFAULT_SLOTS

    @property
    def allowance(self) -> Allowance:
        return Allowance(self.slots_held, self.moments)

    @property
    def grant(self) -> "Grant | None":
        if self.invitation is None:
            return None if self.link is None else self.link.invitation
        from protocol.identity.invitations import Grant

        path = Path(self.invitation)
        return Grant.parse(path.read_text(errors="replace").strip() if path.is_file() else self.invitation)

    @property
    def asked_stage(self) -> int | None:
        return None if self.stage is None else int(self.stage.partition(".")[0])

    @property
    def asked_expert(self) -> int | None:
        _, _, expert = (self.stage or "").partition(".")
        return int(expert) if expert else None

    @property
    def may_move(self) -> bool:
        """Returns `--move`; by default a node moves unless --stage or --stages is given."""
        return self.stage is None and self.stages is None if self.moving is None else self.moving

    @property
    def may_host_more(self) -> bool:
        """Whether the node may host modules that no other peer serves, beside its first one."""
        return self.stage is None and self.stages is None and self.modules != 1

    def of_each_module(self) -> "list[NodeOptions]":
        """Returns the options of each module that the node hosts from the start."""
        if self.stages is None:
            return [self]
        return [self.for_module(str(stage), number) for number, stage in enumerate(parse_stages(self.stages))]

    def for_module(self, stage: str, number: int) -> "NodeOptions":
        """Returns the options of the node's module with this number, from 0, for the stage or expert `stage`."""
        port = self.port and self.port + number
        return dataclasses.replace(self, stage=stage, stages=None, port=port)

    @property
    def local_path_options(self) -> LocalPathOptions:
        # A model's folder usually contains its tokenizer.
        beside = None if self.model is None else self.model / "tokenizer.json"
        return LocalPathOptions(text=self.text, tokenizer=self.tokenizer or beside, hub=self.allow_hub)

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
            raise ConfigError("neither a join link nor a manifest is given")
        object.__setattr__(self, "listen", self.listen.strip("[]"))
        object.__setattr__(self, "advertise", self.advertise and self.advertise.strip("[]"))
        if self.stages is not None and (self.stage is not None or self.modules is not None):
            raise ConfigError("--stages already says what to host", hint="Leave --stage and --modules out.")
        # Options may also come from the environment or from code, so check them here.
        for name, (_, *checks) in SETTINGS.items():
            value = getattr(self, name)
            for check in checks:
                if value is not None and not check.holds(value):
                    raise ConfigError(f"{name} {check.complaint.format(value)}")

    def arguments(self) -> list[str]:
        """Returns the command-line arguments after `skipstone join` that give these options."""
        words = [str(self.link or self.manifest_path)]
        for row in dataclasses.fields(self):
            value = getattr(self, row.name)
            if row.name not in SETTINGS or value == row.default:  # defaults are left out
                continue
            on, _, off = SETTINGS[row.name][0].param_decls[0].partition("/")
            if isinstance(value, bool):
                words.append(on if value else off)
            else:
                words += [on, str(value.value if isinstance(value, enum.Enum) else value)]
        return words


UNLOADED: Final = {"Link": Any}  # Types of fields that are no options; their imports would slow down `--help`
# Option of each field, then its checks.
SETTINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    name: hint.__metadata__
    for name, hint in typing.get_type_hints(NodeOptions, localns=UNLOADED, include_extras=True).items()
    if typing.get_origin(hint) is Annotated
}
VARIABLES: Final = frozenset([variable("link"), *(option.envvar for option, *_ in SETTINGS.values() if option.envvar)])


def parse_stages(text: str) -> list[int]:
    """Parses `--stages`, in ascending order; empty if it is not valid."""
    if re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*", text) is None or len(text) > 1024:
        return []
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return sorted(found) if len(set(found)) == len(found) <= MOST_HOSTED else []


def parse_size(text: str) -> int:
    """Parses bytes such as `1024`, `512MiB` or `2GB`; case does not matter. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is not a size", hint="Write it as 512MiB or 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def memory_limit_of(text: str | None) -> Reasoned[int] | None:
    """Parses `--memory-limit` into bytes, with the option as reason; None if not given. Raises ConfigError."""
    return None if text is None else Reasoned(parse_size(text), f"under --memory-limit {text}")


def own_peer() -> PeerId | None:
    """Returns the peer id of this machine's default key file; None if the file is missing or not usable."""
    from protocol.identity.keys import Identity

    try:
        return Identity.load(default_identity_path()).peer
    except (ConfigError, IdentityError):
        return None


def is_default_identity(path: Path) -> bool:
    """Whether `path` is this machine's default key file."""
    try:
        return path == default_identity_path()
    except ConfigError:
        return False


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of node options."""
    return {name: value for name, value in environment.items() if name not in VARIABLES}
