"""Rows of a data set's file, one after the other: JSON Lines, compressed or not, and Parquet (by pyarrow, an extra)."""

from __future__ import annotations

import errno
import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import zstandard

from node.data.files import LINE_BYTES, open_regular
from swarm.vocabulary.errors import ConfigError

PARQUET: Final = ".parquet"
SUFFIXES: Final = (PARQUET, *(f"{kind}{packed}" for kind in (".jsonl", ".json") for packed in ("", ".gz", ".zst")))
MAX_GROUP_BYTES: Final = 2**31
"""Uncompressed size of the column in a row group. Pyarrow may hold all of it."""
BATCH_ROWS: Final = 256
MAX_WINDOW_BYTES: Final = 2**27

Row = Callable[[], bytes]
"""Reads a row's document. Raises OSError if the row is malformed or too long."""


def rows(path: Path, column: str, start: int, *, is_chat: bool) -> Iterator[Row]:
    """Reads the rows of a file from number `start` on. Raises ConfigError or OSError.

    Args:
        path: ends in one of SUFFIXES.
        column: holds the document, which is a text, or the `messages` of a conversation.
    """
    if path.name.endswith(PARQUET):
        found = _column(path, column, start)
        return (partial(_document, value, is_chat) for value in found)
    return (partial(_of_line, line, column, is_chat) for line in _lines(path, start))


def _document(value: object, is_chat: bool) -> bytes:
    """The document of a value; an empty one, which is left out, if there is none."""
    if value is None:
        return b""
    return (json.dumps({"messages": value}, default=str) if is_chat else str(value)).encode(errors="replace")


def _of_line(line: bytes | None, column: str, is_chat: bool) -> bytes:
    if line is None:
        raise OSError(errno.EFBIG, f"the line has more than {LINE_BYTES} bytes")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise OSError(errno.EINVAL, "the line is no JSON") from None
    if not isinstance(row, dict) or column not in row:
        raise OSError(errno.EINVAL, f"the line is no object with {column!r}")
    return _document(row[column], is_chat)


def _lines(path: Path, start: int) -> Iterator[bytes | None]:
    """Lines that are not blank, None for one that is too long."""
    with _unpacked(path) as file:
        number, is_begin = 0, True
        try:
            while piece := file.readline(LINE_BYTES + 1):
                if is_begin and number == 0 and piece.lstrip()[:1] == b"[":
                    raise ConfigError(f"data.source: {path.name} is not one JSON object a line")
                is_end = piece.endswith(b"\n") or len(piece) <= LINE_BYTES
                if is_begin and piece.strip():
                    if number >= start:
                        yield piece if is_end else None
                    number += 1
                is_begin = is_end
        except (EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise ConfigError(f"data.source: {path.name} cannot be unpacked: {error}") from error


@contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    with open_regular(path) as file:
        if path.name.endswith(".gz"):
            with gzip.open(file, "rb") as packed:
                yield cast("BinaryIO", packed)
        elif path.name.endswith(".zst"):
            unpacking = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
            with io.BufferedReader(unpacking.stream_reader(file, read_across_frames=True)) as reader:
                yield cast("BinaryIO", reader)
        else:
            yield file


def _column(path: Path, column: str, start: int) -> Iterator[Any]:
    """Values of the column from row `start` on; earlier row groups are not read."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            "data.source names a data set of Parquet files, and the `pyarrow` library is not installed",
            hint="Install it with `pip install 'skipstone[datasets]'`.",
        ) from None
    try:
        with open_regular(path) as file, ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            if column not in names:
                raise ConfigError(f"data.source: {path.name} has no column {column!r}; it has {', '.join(names)}")
            at = 0
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if at + count > start:
                    _require_bounded(parquet.metadata.row_group(group), column, path)
                    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column]):
                        values = batch.column(0)
                        for number in range(max(0, start - at), len(values)):
                            yield values[number].as_py()
                        at += len(values)
                else:
                    at += count
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data.source: {path.name} cannot be read: {error}") from error


def _require_bounded(group: Any, column: str, path: Path) -> None:
    parts = (group.column(number) for number in range(group.num_columns))
    size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] == column)
    if size > MAX_GROUP_BYTES:
        raise ConfigError(
            f"data.source: a row group of {path.name} has {size} bytes in {column!r}, more than {MAX_GROUP_BYTES}",
            hint="Use a data set of smaller row groups, or a folder of your own with path:FOLDER.",
        )
