"""Data sets of the Hugging Face hub, by the `datasets` library, as they were at a commit: fetched whole. Those that are
dealt by files are read by `node.data.formats.hub_stream`.

Nothing is fetched with the person's token, so that nothing private is read, and no code of a data set is run, which
`datasets` does no more since version 4.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from node.data.formats.document_names import MAX_DOCUMENTS, RowNames
from node.data.formats.hub_files import hub_place, require_commit
from swarm.vocabulary.errors import ConfigError

MAX_HUB_BYTES: Final = 2**38
"""All files of a data set together."""


class HuggingFaceSource:
    """A source of a column of a data set; a row is a document. The whole set is fetched and rows stay on disk until
    they are read; which of them a data node reads follows from their numbers, as of any documents.
    """

    def __init__(self, place: str, revision: str | None = None, *, is_chat: bool = False) -> None:
        """`place` is `NAME[:CONFIG[:SPLIT[:COLUMN]]]`; empty parts mean no config, `train` and `text`, or `messages`
        where rows are conversations. `revision` is the commit of it; None, as in older manifests, for the newest.

        Raises:
            ConfigError: it cannot be loaded, is another one now, or is too large.
        """
        found = hub_place(place, is_chat=is_chat)
        self._is_chat, self._column = is_chat, found.column
        self._rows = _load_data_set(found.name, found.config, found.split, revision)
        if self._column not in self._rows.column_names:
            columns = ", ".join(self._rows.column_names)
            raise ConfigError(f"data.source: {found.name} has no column {self._column!r}; it has {columns}")
        self.names = RowNames(len(self._rows))

    def read(self, name: str) -> bytes:
        found = self._rows[int(name)][self._column]
        return (json.dumps({"messages": found}, default=str) if self._is_chat else str(found)).encode()


def newest_commit(place: str) -> str:
    """The commit to which the hub's data set `NAME[:...]` resolves now, 40 hexadecimal digits.

    Raises:
        ConfigError: there is no such data set, or the hub cannot be asked.
    """
    name = place.partition(":")[0]
    try:
        from huggingface_hub import HfApi

        commit = HfApi(token=False).dataset_info(name, files_metadata=False, token=False).sha
    except Exception as error:  # of that library, and of those that it fetches with
        raise ConfigError(
            f"data.source: which commit of the data set {name!r} is to be read is not known: {error}",
            hint="Name it with --revision COMMIT, or install what asks the hub: pip install 'skipstone[datasets]'.",
        ) from error
    return str(commit)


def _load_data_set(name: str, config: str | None, split: str, revision: str | None) -> Any:
    try:
        import datasets  # an extra: heavy, and not needed for local text
        from huggingface_hub import HfApi
    except ImportError:
        raise ConfigError(
            "data.source names a Hugging Face data set, and the `datasets` library is not installed",
            hint="Install it with `pip install 'skipstone[datasets]'`, or use another data.source.",
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ConfigError(
            (
                f"data.source: version {datasets.__version__} of the `datasets` library can run code that a data "
                "set brings along"
            ),
            hint="Install a newer one with `pip install 'skipstone[datasets]'`.",
        )
    if os.path.lexists(name):  # the library would take that
        raise ConfigError(
            f"data.source: there is a file or folder {name} here, which would be read in place of the hub's data set",
            hint="Start the node in another folder.",
        )
    try:
        info = HfApi(token=False).dataset_info(name, revision=revision, files_metadata=True, token=False)
        size = sum(file.size or 0 for file in info.siblings or ())
        require_commit(name, revision, info.sha)  # and the size: before anything of it is fetched
        if size > MAX_HUB_BYTES:
            raise ConfigError(f"data.source: the data set {name!r} has {size} bytes, more than {MAX_HUB_BYTES}")
        rows = datasets.load_dataset(name, config, split=split, revision=revision, token=False)
    except ConfigError:
        raise
    except Exception as error:  # of these libraries, and of those that they fetch with
        raise ConfigError(f"data.source: the data set {name!r} cannot be loaded: {error}") from error
    if len(rows) > MAX_DOCUMENTS:
        raise ConfigError(f"data.source: the data set {name!r} has {len(rows)} rows, more than {MAX_DOCUMENTS}")
    return rows
