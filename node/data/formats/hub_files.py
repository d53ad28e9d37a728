"""The files of a data set of the Hugging Face hub at a commit, and which of them a config and a split are.

Which files those are stands in the head of the data set's README (`configs`, huggingface.co/docs/hub/
datasets-manual-configuration); where it says nothing of them, names do, by the words that the `datasets` library knows.
The hub is asked for the head and for names and sizes, and for nothing else; nothing of it is run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

from node.data.formats.row_files import SUFFIXES
from swarm.vocabulary.errors import ConfigError

MAX_HUB_FILES: Final = 2**17
MOST_STARS: Final = 6
"""In a pattern of files."""
MOST_SAID: Final = 400
"""Signs of an error of a library."""

WAITS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds between tries of a question or a file; after the last the run's text cannot be read."""
_FINAL: Final = (401, 403, 404, 410)
"""Answers of HTTP after which the same question has the same answer."""

T = TypeVar("T")
Pause = Callable[[float], object]

logger = logging.getLogger(__name__)

_OF_SPLITS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in names of files and folders, between other signs than letters."""


@dataclass(frozen=True, slots=True)
class HubPlace:
    """The parts of `NAME[:CONFIG[:SPLIT[:COLUMN]]]`."""

    name: str
    config: str | None
    split: str
    column: str


def hub_place(place: str, *, is_chat: bool) -> HubPlace:
    """The place with what empty parts mean: no config, `train`, and `text`, or `messages` of conversations."""
    name, config, split, column = (place.split(":") + [""] * 3)[:4]
    return HubPlace(name, config or None, split or "train", column or ("messages" if is_chat else "text"))


def insisted(ask: Callable[[], T], what: str, pause: Pause) -> T:
    """The hub's answer to a question, which is asked again as long as another answer may come.

    Args:
        what: of the question, in an error.
        pause: waits so many seconds.

    Raises:
        ConfigError: there is none.
    """
    for wait in (*WAITS, None):
        try:
            return ask()
        except Exception as error:  # of the hub's library, and of those that it fetches with
            said = " ".join(str(error).split())[:MOST_SAID] or type(error).__name__
            status = getattr(getattr(error, "response", None), "status_code", None)
            if wait is None or status in _FINAL:
                raise ConfigError(
                    f"data.source: {what} cannot be had from the hub: {said}",
                    hint="Start the node again when it can; it goes on from its checkpoint.",
                ) from error
            logger.warning("%s cannot be had from the hub, the next try is in %g s: %s", what, wait, said)
            pause(wait)
    raise AssertionError("the last try returns or raises")


def files_of(place: HubPlace, commit: str, api: Any, pause: Pause) -> dict[str, int]:
    """The files of the config and split at the commit, in order of their names, and their sizes in bytes.

    Args:
        api: a `huggingface_hub.HfApi`.
        pause: as of `insisted`.

    Raises:
        ConfigError: the hub cannot be asked, gives another commit, or has no such files there, or none that are read.
    """

    def ask() -> tuple[Any, list[Any]]:
        info = api.dataset_info(place.name, revision=commit, expand=["sha", "cardData"], token=False)
        tree = api.list_repo_tree(place.name, revision=commit, repo_type="dataset", recursive=True, token=False)
        return info, list(islice(tree, MAX_HUB_FILES + 1))

    info, found = insisted(ask, f"the list of files of {place.name}", pause)
    require_commit(place.name, commit, info.sha)
    if len(found) > MAX_HUB_FILES:
        raise ConfigError(f"data.source: the data set {place.name!r} has more than {MAX_HUB_FILES} files")
    sizes = {file.path: file.size for file in found if getattr(file, "size", 0)}
    names = chosen(place, _configs(info), sizes)
    unread = [name for name in names if not name.endswith(SUFFIXES)]
    if unread:
        raise ConfigError(
            f"data.source: {unread[0]} of the data set {place.name!r} is none of {', '.join(SUFFIXES)}",
            hint="Make the manifest with --dealt-by documents; data nodes then fetch the whole set.",
        )
    return {name: sizes[name] for name in names}


def require_commit(name: str, revision: str | None, found: str | None) -> None:
    """Refuses a data set that the hub gives at another commit than the manifest's, before anything of it is fetched.

    Raises:
        ConfigError: it is another one.
    """
    if revision is not None and found != revision:
        raise ConfigError(
            f"data.source: the data set {name!r} is {found} on the hub, the manifest asks for {revision}",
            hint="Ask the run's author; that commit is not there any more, or the name is another data set's.",
        )


def chosen(place: HubPlace, configs: Sequence[Mapping[str, Any]], files: Iterable[str]) -> list[str]:
    """The names of the files of the place's config and split, sorted.

    Args:
        configs: from the head of the README.

    Raises:
        ConfigError: there is no such config or split, or it is not said which config is meant.
    """
    visible = sorted(name for name in files if not any(part[0] in "._" for part in name.split("/")))
    if not any("data_files" in config or "data_dir" in config for config in configs):
        if place.config not in (None, "default"):
            raise ConfigError(f"data.source: {place.name} names no configs, and so none {place.config!r}")
        return _by_words(place, [name for name in visible if name.endswith(SUFFIXES)])
    config = _config(place, configs)
    below = str(config.get("data_dir") or "").strip("/.")
    names = [name for name in visible if not below or name.startswith(f"{below}/")]
    if "data_files" not in config:
        return _by_words(place, [name for name in names if name.endswith(SUFFIXES)])
    patterns = [f"{below}/{pattern}" if below else pattern for pattern in _patterns(config["data_files"], place.split)]
    matching = [_compiled(pattern) for pattern in patterns]
    return _some(place, [name for name in names if any(pattern.fullmatch(name) for pattern in matching)])


def _configs(info: Any) -> list[Mapping[str, Any]]:
    """What a stranger wrote into a README: of any shape."""
    card: Any = getattr(info, "card_data", None)
    found = card.get("configs") if hasattr(card, "get") else None
    return [config for config in found if isinstance(config, Mapping)] if isinstance(found, list) else []


def _config(place: HubPlace, configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    named = {str(config.get("config_name", "default")): config for config in configs}
    if place.config is not None:
        if place.config in named:
            return named[place.config]
        raise ConfigError(f"data.source: {place.name} has no config {place.config!r}; it has {', '.join(named)}")
    defaults = [config for config in configs if config.get("default") is True]
    if defaults or "default" in named or len(named) == 1:
        return defaults[0] if defaults else named.get("default") or configs[0]
    raise ConfigError(
        f"data.source: {place.name} has several configs and none is the default: {', '.join(named)}",
        hint=f"Name one of them: huggingface:{place.name}:CONFIG.",
    )


def _patterns(data_files: Any, split: str) -> list[str]:
    """`data_files` is a pattern, a list of some, both of the split `train`, or a list of splits, each with its own."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: list[str] = []
    for entry in entries:
        is_named = isinstance(entry, Mapping)
        if (str(entry.get("split", "train")) if is_named else "train") == split:
            paths = entry.get("path") if is_named else entry
            patterns += map(str, paths if isinstance(paths, list) else [paths])
    return patterns


def _compiled(pattern: str) -> re.Pattern[str]:
    """As the hub's own file system matches them: `*` stays within a folder, `**` does not.

    Raises:
        ConfigError: it has so many that matching could take for ever, which whoever wrote the README may want.
    """
    from fsspec.utils import glob_translate

    if pattern.count("*") > MOST_STARS:
        raise ConfigError(f"data.source: a pattern of the data set's files has more than {MOST_STARS} `*`: {pattern!r}")
    return re.compile(glob_translate(pattern.removeprefix("./")))


def _by_words(place: HubPlace, names: Sequence[str]) -> list[str]:
    """By a split's words in the names; all files are `train` where no name has a word of any split."""
    splits = {name: split for name in names for split in _OF_SPLITS if _has_word(name, _OF_SPLITS[split])}
    if not splits and place.split == "train":
        return _some(place, names)
    words = _OF_SPLITS.get(place.split, (place.split,))
    return _some(place, [name for name in names if _has_word(name, words)])


def _has_word(name: str, words: Iterable[str]) -> bool:
    return re.search(rf"(?<![a-z])({'|'.join(map(re.escape, words))})(?![a-z])", name.lower()) is not None


def _some(place: HubPlace, names: Sequence[str]) -> list[str]:
    if not names:
        of = "" if place.config is None else f" of its config {place.config!r}"
        raise ConfigError(f"data.source: {place.name} has no file of the split {place.split!r}{of} that is read")
    return list(names)
