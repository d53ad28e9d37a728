"""Rules for which local files a manifest may open. Manifests come from strangers and must not read private files."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import Reasoned

if TYPE_CHECKING:
    from protocol.manifest.manifest import DataSection


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPathOptions:
    text: Path | None = None
    tokenizer: Path | None = None
    hub: bool = False


NO_LOCAL_PATHS: Final = LocalPathOptions()


@dataclass(frozen=True, slots=True)
class LocalPaths:
    """Local paths of the run's text and tokenizer file; None if the manifest names no such file."""

    text: Path | None = None
    tokenizer: Path | None = None


def may_open(named: str, option: str, chosen: Path | None, *, own: bool) -> Reasoned[Path | None]:
    """Returns the local path for a manifest's path, or None if forbidden. `chosen`: the user's value of `option`."""
    if chosen is not None:
        return Reasoned(chosen, f"given by {option}")
    if not own:
        return Reasoned(None, f"another machine signed the manifest, so {named} is not opened. Give it with {option}")
    # Hidden folders often hold secrets, so a path in a manifest is not enough.
    if any(part.startswith(".") and part != ".." for part in Path(named).parts):
        return Reasoned(None, f"a manifest may not open hidden files such as {named}. Give the path with {option}")
    return Reasoned(_from_home(named), "by this machine's own manifest")


def tokenizer_path(data: "DataSection", chosen: Path | None, *, own: bool) -> Reasoned[Path | None]:
    return may_open(data.tokenizer.removeprefix("file:"), "--tokenizer", chosen, own=own)


def local_paths(data: "DataSection", options: LocalPathOptions, *, own: bool) -> Reasoned[LocalPaths | None]:
    """Returns the local paths of the run's text, or None if none is allowed. `own`: our key signed the manifest."""
    kind, rest = data.kind, data.source.partition(":")[2]
    text: Reasoned[Path | None] = Reasoned(None, "the source code of this machine's Python")
    if data.is_of_files:
        text = may_open(rest, "--text", options.text, own=own)
        if text.value is not None and options.text is None:
            text = Reasoned(_without_column(text.value, data), text.reason)
    elif kind == "huggingface":
        if not (own or options.hub):
            return Reasoned(None, f"another machine's manifest may not download ({rest}). Allow it with --allow-hub")
        text = Reasoned(None, "from the Hugging Face hub")
    if data.is_of_files and text.value is None:
        return Reasoned(None, text.reason)
    if data.tokenizer == "bytes":
        return Reasoned(LocalPaths(text.value), text.reason)
    return Reasoned(LocalPaths(text.value, tokenizer_path(data, options.tokenizer, own=own).value), text.reason)


def as_written(data: "DataSection") -> LocalPaths:
    """Returns the manifest's own paths, hidden ones included, for an author's own run (`solo`, `up`, benchmarks)."""
    text = _without_column(_from_home(data.source.partition(":")[2]), data) if data.is_of_files else None
    return LocalPaths(text, None if data.tokenizer == "bytes" else _from_home(data.tokenizer.removeprefix("file:")))


def _from_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # unknown user
        raise ConfigError(f"{path}: {error}", hint="Write the absolute path.") from None


def text_column(data: "DataSection", place: Path) -> str | None:
    """Returns COLUMN of `path:FILE-OR-FOLDER:COLUMN`, opened at `place`; None if the colon belongs to the name."""
    path, _, column = data.source.partition(":")[2].rpartition(":")
    # In `C:\\text`, the colon belongs to the drive.
    is_column = data.kind == "path" and len(path) > 1 and column and not {"/", "\\"} & {*column}
    return column if is_column and not place.name.endswith(f":{column}") else None


def _without_column(path: Path, data: "DataSection") -> Path:
    column = text_column(data, Path())
    return path if column is None or path.exists() else path.with_name(path.name.removesuffix(f":{column}"))
