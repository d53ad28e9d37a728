"""Options that several commands share, and join links on the command line."""

import contextlib
import dataclasses
import inspect
import logging
import tempfile
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from node.context.options import UNLOADED, default_identity_path, variable
from node.context.whole_file import write_whole
from node.model.moments import MomentType
from node.observability.events import Event, EventSink, NodeStatus
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import MAX_VISIT_RATIO

if TYPE_CHECKING:
    from protocol.manifest.join_link import Link

VisitedPerPath: Final[Any] = typer.Option(min=1, help="Stages after stage 0 that a path visits [default: all]")
VisitRatio: Final[Any] = typer.Option(min=1.0, max=MAX_VISIT_RATIO, help="Largest ratio of visits [default: 1]")
StagesPerPath: Final[Any] = typer.Option(min=1, help="Use this many stages after stage 0 [default: all]")

Source: Final[Any] = typer.Argument(metavar="LINK|SOURCE", help="Join link, checkpoint folder or exported folder.")

PathChoice: Final[Any] = typer.Option("--path", metavar="S.E,...", help="Path through experts, as 1.0,2.1")

MomentsChoice: Final[Any] = typer.Option("--moments", help="AdamW's moments; 8bit takes a quarter.")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of the commands that train a run on this machine. Raises ConfigError if no checkpoint can be written."""

    run: Annotated[Path | None, typer.Argument(metavar="RUN", help="Manifest or checkpoint [default: a demo]")] = None
    data: Annotated[str | None, typer.Option(help="Text to train on [default: the manifest's]")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of weights and data order [default: the manifest's]")] = None
    model: Annotated[Path | None, typer.Option(help="Folder of the model that the run starts from.")] = None
    moments: Annotated[MomentType, MomentsChoice] = MomentType.FLOAT32
    checkpoint_dir: Annotated[Path | None, typer.Option(help="Folder to save to and resume from")] = None
    checkpoint_every: Annotated[float, typer.Option(min=0.1, help="Interval between checkpoints, in seconds.")] = 300.0

    def __post_init__(self) -> None:
        require_writable(self.checkpoint_dir)

    @property
    def file(self) -> Path | None:
        return manifest_file(self.run)


def with_options(*tables: type) -> Callable[[Any], Any]:
    """Decorates a command: adds an option per annotated field of `tables`. Passes all values in `**settings`."""

    def added(command: Any) -> Any:
        own = inspect.signature(command, eval_str=True)
        rows = [
            # A field without a default comes from elsewhere, so its option is optional.
            row.replace(default=None) if made[name] is dataclasses.MISSING else row
            for table in tables
            for made in ({field.name: field.default for field in dataclasses.fields(table)},)
            for name, row in inspect.signature(table, locals=UNLOADED, eval_str=True).parameters.items()
            if typing.get_origin(row.annotation) is Annotated
        ]
        given = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        command.__signature__ = own.replace(parameters=[*given, *rows])
        return command

    return added


class NewLinks:
    """Event sink that passes each new join link of the node to `tell`, and forwards every event."""

    def __init__(self, tell: Callable[[str], None], behind: EventSink) -> None:
        self._tell, self._behind = tell, behind
        self._told: str | None = None

    def emit(self, event: Event) -> None:
        self._behind.emit(event)
        if isinstance(event, NodeStatus) and event.link != self._told:
            self._told = event.link
            self._tell(event.link)


def keep_link(path: Path, link: str) -> None:
    """Writes the link to a file atomically, or logs why not."""
    try:
        write_whole(path, f"{link}\n".encode())
    except OSError as error:
        log.warning("cannot write the join link to %s: %s", path, error.strerror or error)


def manifest_file(path: Path | None) -> Path | None:
    """Returns the manifest's file: `path`, or `path`/manifest.toml of a checkpoint folder."""
    return path / "manifest.toml" if path is not None and path.is_dir() else path


def last_link_path() -> Path:
    """Returns the file with the link of the run that this machine's user joined last."""
    return default_identity_path().with_name("last-run.link")


RunLink: Final[Any] = typer.Argument(
    envvar=variable("link"), show_envvar=False, help="Join link or its file [default: the run joined last]"
)


def run_link(text: str | None) -> "Link":
    """Parses the link of a run; by default of the one that this machine joined last. Raises ConfigError."""
    from protocol.manifest.join_link import link_in, read_link

    link = link_in(str(last_link_path())) if text is None else read_link(text)
    if link is None:
        raise ConfigError("no run was joined on this machine", hint="Name a run by its link, as skipstone:...")
    return link


def keep_run(link: str) -> None:
    """Keeps the link for `join` and `status` without one."""
    path = last_link_path()
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    keep_link(path, link)


def require_writable(folder: Path | None) -> None:
    """Creates a file in the checkpoint folder and removes it. Raises ConfigError if that fails."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"cannot write checkpoints to {folder}: {error.strerror or error}",
            hint="Choose a folder that can be written with --checkpoint-dir, or leave the option out.",
        ) from None
