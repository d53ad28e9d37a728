"""The places on this machine that may be opened for a run's text. A stranger's manifest must not name local files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import Reasoned


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldPlaces:
    text: Path | None = None
    tokenizer: Path | None = None
    hub: bool = False


NOTHING_TOLD: Final = ToldPlaces()


@dataclass(frozen=True, slots=True)
class Places:
    """The places where what the manifest names is opened; None where it names no file."""

    text: Path | None = None
    tokenizer: Path | None = None


def may_open(named: str, option: str, told: Path | None, *, own: bool) -> Reasoned[Path | None]:
    """The place where a path of a manifest is opened, or None. `told` is the value of the command-line `option`."""
    if told is not None:
        return Reasoned(told, f"where {option} says")
    if not own:
        return Reasoned(
            None,
            (
                f"the manifest is not signed by this machine's key, so its {named} is not opened; say with "
                f"{option} where it lies here"
            ),
        )
    path = Path(named)
    if any(part.startswith(".") and part != ".." for part in path.parts):
        return Reasoned(
            None,
            f"a hidden place is not opened because a manifest says so, so its {named} is not; name it with {option}",
        )
    return Reasoned(_from_home(named), "this machine's own manifest says so")


def tokenizer_place(data: DataSection, told: Path | None, *, own: bool) -> Reasoned[Path | None]:
    return may_open(data.tokenizer.removeprefix("file:"), "--tokenizer", told, own=own)


def places(data: DataSection, told: ToldPlaces, *, own: bool) -> Reasoned[Places | None]:
    """The places of everything that reading the run's text opens, or None if it must not be read; see `may_open`."""
    kind, rest = data.kind, data.source.partition(":")[2]
    text: Reasoned[Path | None] = Reasoned(None, "the source code of this machine's Python")
    if data.is_of_files:
        text = may_open(rest, "--text", told.text, own=own)
    elif kind == "huggingface":
        if not (own or told.hub):
            return Reasoned(
                None, f"nothing is fetched from a hub for somebody else's manifest ({rest}) without --allow-hub"
            )
        text = Reasoned(None, "from the Hugging Face hub")
    if data.is_of_files and text.value is None:
        return Reasoned(None, text.reason)
    if data.tokenizer == "bytes":
        return Reasoned(Places(text.value), text.reason)
    tokenizer = tokenizer_place(data, told.tokenizer, own=own)
    return Reasoned(Places(text.value, tokenizer.value), text.reason)


def as_written(data: DataSection) -> Places:
    """The places as written in a manifest whose author runs it here, hidden ones included: `solo`, `up`, benchmarks."""
    text = _from_home(data.source.partition(":")[2]) if data.is_of_files else None
    return Places(text, None if data.tokenizer == "bytes" else _from_home(data.tokenizer.removeprefix("file:")))


def _from_home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # `~nobody`
        raise ConfigError(f"{path}: {error}", hint="Write the whole path.") from None
