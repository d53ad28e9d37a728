"""Files of text and rows as they are found: plain text, JSON Lines, a JSON array, CSV or Parquet, perhaps packed."""

import bz2
import codecs
import csv
import errno
import gzip
import io
import json
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TextIO

import zstandard

from node.data.files import LINE_BYTES, open_regular
from swarm.vocabulary.errors import ConfigError

HEAD_BYTES: Final = 2**16  # Size of a file's beginning, by which it is recognised, in bytes
DOCUMENT_BYTES: Final = 2**20  # Largest document from a folder, in bytes. Longer files become several documents
CUT_BYTES: Final = 2**12  # Distance that a cut moves at most to reach the end of a line
MAX_GROUP_BYTES: Final = 2**31  # Columns of a row group, uncompressed; pyarrow may keep all of them in memory
MAX_WINDOW_BYTES: Final = 2**27
TEXT_COLUMN: Final = "text"
CHAT_COLUMNS: Final = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
"""Columns of the known kinds of conversation."""

_FIRST_ROWS: Final = 16
_BAD_SHARE: Final = 1000  # Text has at most one invalid character in this many
_ENCODINGS: Final = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}
_BINARY: Final = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"%PDF": "a PDF document",
    b"PK": "a zip archive of several files, or an Office document",
    b"version https://git-lfs": "a Git LFS pointer (get the file itself with `git lfs pull`)",
}
_STRUCTURE: Final = re.compile(r'[\[\]{}",\\]')

Row = Callable[[], bytes]  # Reads a row's document. Raises OSError if the row is malformed or too long


class Kind(Enum):
    TEXT = "plain text"
    LINES = "JSON Lines"
    ARRAY = "a JSON array"
    CSV = "CSV"
    PARQUET = "Parquet"


class Format(NamedTuple):
    kind: Kind
    encoding: str = "utf-8"
    is_plain: bool = False  # Documents are UTF-8 at their offsets in the file: not packed, no other encoding
    doubt: ConfigError | None = None  # Reason for which a new run must not use the file


class Wanted(NamedTuple):
    """The column to read, or None for the usual ones, and whether documents are conversations."""

    named: str | None
    is_chat: bool

    @property
    def needs_rows(self) -> bool:
        return self.is_chat or self.named is not None

    @property
    def column(self) -> str | None:
        """The only column, or None if conversations are in CHAT_COLUMNS."""
        return self.named or (None if self.is_chat else TEXT_COLUMN)


class NotTextError(Exception):
    """A file that is not text."""


def format_of(file: BinaryIO, name: str, wanted: Wanted) -> Format:
    """Recognises a file by its beginning. Raises NotTextError, ConfigError or OSError."""
    with _named(name):
        stream = _unpacked(file)
        head = stream.read(HEAD_BYTES)
    if head.startswith(b"PAR1") and stream is file:
        return Format(Kind.PARQUET)
    encoding = next((encoding for bom, encoding in _ENCODINGS.items() if head.startswith(bom)), "utf-8")
    if encoding == "utf-8":
        _require_no_binary(head)
    base = re.sub(r"\.(gz|zst|bz2|xz|zip)$", "", name.lower())
    is_lines = base.endswith((".jsonl", ".ndjson"))
    kind, rows = _first_rows(codecs.getincrementaldecoder(encoding)("replace").decode(head).lstrip(), base)
    is_plain = stream is file and encoding.startswith("utf-8")
    found = Format(kind, encoding, is_plain, encoding_problem(head, name, encoding))
    if kind is Kind.TEXT:
        return found._replace(kind=Kind.LINES) if wanted.needs_rows and is_lines else found
    if wanted.column is None and not (is_lines or any({*shape} <= {*row} for row in rows for shape in CHAT_COLUMNS)):
        raise NotTextError(f"{kind.value} without conversations; it has {', '.join(rows[0])[:400]}")
    values = [row[wanted.column] for row in rows if wanted.column in row]
    if wanted.column is None or values:
        if not (wanted.is_chat or isinstance(values[0], str | None)):
            raise _not_text(name, str(wanted.column), type(values[0]).__name__, str(values[0]))
        return found
    # A single object without the column may be a settings file among sources.
    is_data = wanted.needs_rows or len(rows) > 1 or kind is Kind.CSV or is_lines
    doubt = _no_column(name, str(wanted.column), list(rows[0])) if is_data else None
    return found._replace(kind=kind if wanted.needs_rows else Kind.TEXT, doubt=doubt)


def _first_rows(text: str, name: str) -> tuple[Kind, list[dict[str, Any]]]:
    """Returns the kind of a text by its first rows, and these. A CSV file has one: its header."""
    lines = text.split("\n", _FIRST_ROWS)
    is_array = text.startswith("[")
    rows = _objects(_elements(io.StringIO(text))) if is_array else _objects(line for line in lines if line.strip())
    if not rows and len(text) > HEAD_BYTES // 4 and re.match(r'(\[\s*)?\{\s*"', text):  # a long first row
        rows = [dict.fromkeys(re.findall(r'"(\w{1,64})"\s?:', text), "")]
    if rows:
        return Kind.ARRAY if is_array else Kind.LINES, rows
    delimiter = _delimiter(lines[0])
    columns = next(csv.reader(lines[0].splitlines(), delimiter=delimiter), [])
    has_rows = len(columns) > 1 and "".join(lines[1:2]).count(delimiter) >= len(columns) - 1
    if name.endswith((".csv", ".tsv")) or (has_rows and TEXT_COLUMN in columns):
        return Kind.CSV, [dict.fromkeys(columns, "")]
    return Kind.TEXT, []


def _delimiter(header: str) -> str:
    return max("\t;|,", key=header.count)


def _objects(rows: Iterable[str | None]) -> list[dict[str, Any]]:
    """Parses the first rows, up to one that is not a JSON object."""
    found = list[dict[str, Any]]()
    with suppress(ValueError, RecursionError):
        for row in islice(rows, _FIRST_ROWS):
            if not isinstance(read := json.loads(row or ""), dict):
                break
            found.append(read)
    return found


def _require_no_binary(head: bytes) -> None:
    for magic, what in _BINARY.items():
        if head.startswith(magic):
            raise NotTextError(what)
    if (at := head.find(0)) >= 0:
        is_wide = abs(head[::2].count(0) - head[1::2].count(0)) * 6 > len(head)
        raise NotTextError("UTF-16 without a byte order mark" if is_wide else f"binary (a NUL byte at offset {at})")


def encoding_problem(text: bytes, name: str, encoding: str = "utf-8") -> ConfigError | None:
    """Returns an error that names the first invalid byte if too many characters of the text are invalid."""
    decoded = codecs.getincrementaldecoder(encoding)("replace").decode(text)
    if (bad := decoded.count("\ufffd") - text.count("\ufffd".encode())) * _BAD_SHARE <= len(decoded):
        return None
    likely = "WINDOWS-1252" if sum(byte > 127 for byte in text) * 4 < len(text) else "GB18030 or WINDOWS-1251"
    if sum(text.count(byte) for byte in (*range(1, 9), *range(14, 27))) * 100 > len(text):
        likely = "binary data"
    return ConfigError(
        f"data.source: {name} is not {encoding.upper()}: {bad} of the first {len(decoded)} characters are invalid, "
        f"the first at byte {len(decoded.partition(chr(0xFFFD))[0].encode())}. It is probably {likely}",
        hint="Choose a file with text, or convert it: `iconv -f WINDOWS-1252 -t UTF-8 FILE`.",
    )


def _unpacked(file: BinaryIO) -> BinaryIO:
    """Returns a stream of the file's content, decompressed if it is packed."""
    file.seek(0)
    head = file.read(CUT_BYTES)
    file.seek(0)
    packed: Any = file
    if head.startswith(b"\x1f\x8b\x08"):
        packed = gzip.GzipFile(fileobj=file)
    elif head.startswith(b"BZh"):
        packed = bz2.BZ2File(file)
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        unpacking = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
        packed = io.BufferedReader(unpacking.stream_reader(file, read_across_frames=True, closefd=False))
    elif head.startswith(b"\xfd7zXZ\0"):
        lzma.LZMADecompressor(memlimit=MAX_WINDOW_BYTES).decompress(head, 1)  # raises LZMAError for a large dictionary
        packed = lzma.LZMAFile(file)  # noqa: SIM115
    elif head.startswith(b"PK\3\4"):
        file.seek(-min(22, len(head)), os.SEEK_END)
        if int.from_bytes(file.read()[12:16], "little") < HEAD_BYTES:  # the list of files, which `ZipFile` reads whole
            archive = zipfile.ZipFile(file)
            files = [each for each in archive.infolist() if not each.is_dir()]
            packed = archive.open(files[0]) if len(files) == 1 else file
        file.seek(0)
    return packed  # type: ignore[no-any-return]


# RuntimeError: an encrypted archive, or an unknown method
_BROKEN: Final = (EOFError, OSError, RuntimeError, zlib.error, lzma.LZMAError, zstandard.ZstdError, zipfile.BadZipFile)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Converts errors of decompressors to ConfigError with the file's name."""
    try:
        yield
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ConfigError(f"data.source: cannot decompress {name}: {error}", hint="Get or unpack it again.") from error


def rows_of(path: Path, column: str | None, start: int, *, is_chat: bool) -> Iterator[Row]:
    """Yields a reader for each row of a file, beginning with row `start`. Raises ConfigError or OSError."""
    with open_regular(path) as file:
        yield from rows_in(file, path.name, Wanted(column, is_chat), start)


def rows_in(file: BinaryIO, name: str, wanted: Wanted, start: int, piece: int = DOCUMENT_BYTES) -> Iterator[Row]:
    """Yields a reader for each row of an open file, or for each piece of about `piece` characters of plain text."""
    with _named(name):
        try:
            kind, encoding, _, _ = format_of(file, name, wanted)
        except NotTextError as error:
            raise ConfigError(f"data.source: {name} cannot be used: it is {error}") from None
        if kind is Kind.PARQUET:
            yield from _parquet_rows(file, name, start, wanted)
            return
        if kind is Kind.TEXT and wanted.needs_rows:
            raise ConfigError(f"data.source: {name} is {kind.value} without rows", hint="Choose a file with rows.")
        text = io.TextIOWrapper(_unpacked(file), encoding, "replace", newline="\n")
        try:
            if kind is Kind.TEXT:
                pieces = iter(lambda: text.read(piece) + text.readline(CUT_BYTES), "")
                yield from (partial(each.encode, errors="replace") for each in islice(pieces, start, None))
            else:
                read = {Kind.LINES: _lines, Kind.ARRAY: _elements, Kind.CSV: _csv_rows}[kind]
                rows: Iterator[Any] = read(text)
                yield from (partial(_document, row, wanted, name) for row in islice(rows, start, None))
        finally:
            text.detach()  # would close the file


def _lines(text: TextIO) -> Iterator[str | None]:
    """Yields the non-blank lines. None for a line that is too long."""
    is_begin = True
    while piece := text.readline(LINE_BYTES + 1):
        is_end = piece.endswith("\n") or len(piece) <= LINE_BYTES  # else the line is too long and continues
        if is_begin and piece.strip():
            yield piece if is_end else None
        is_begin = is_end


def _elements(text: TextIO) -> Iterator[str | None]:
    """Yields the elements of a JSON array as JSON. None for an element that is too long."""
    element, depth, skipped, is_quoted = "", 0, 0, False
    while chunk := text.read(HEAD_BYTES):
        begin = 0
        for found in _STRUCTURE.finditer(chunk):
            mark, at = found[0], found.start()
            if at < skipped:  # after a backslash
                continue
            if is_quoted:
                skipped, is_quoted = (at + 2 if mark == "\\" else skipped), mark != '"'
                continue
            is_quoted = mark == '"'
            depth += (mark in "[{") - (mark in "]}")
            if depth == 1 and mark == "[":
                begin = at + 1
            elif depth == 0 or (depth == 1 and mark == ","):
                element += chunk[begin:at]
                if element.strip():
                    yield element if len(element) <= LINE_BYTES else None
                element, begin = "", at + 1
                if depth == 0:
                    return
        element = (element + chunk[begin:])[: LINE_BYTES + 1]
        skipped -= len(chunk)
    if element.strip():
        yield element


def _csv_rows(text: TextIO) -> Iterator[dict[str, Any] | None]:
    """Yields the rows below the header. None for a malformed row."""
    csv.field_size_limit(LINE_BYTES)
    first = text.readline(LINE_BYTES)
    reader = csv.reader(iter(partial(text.readline, LINE_BYTES), ""), delimiter=_delimiter(first))
    header = next(csv.reader(first.splitlines(), delimiter=_delimiter(first)), [])
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            row = [""]
        if row:
            yield dict(zip(header, row, strict=True)) if len(row) == len(header) else None


def _parquet_rows(file: BinaryIO, name: str, start: int, wanted: Wanted) -> Iterator[Row]:
    """Yields the rows of a Parquet file, beginning with row `start`. Does not read earlier row groups."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigError(
            "data.source has Parquet files, but the `pyarrow` library is not installed",
            hint="Install it with `pip install 'skipstone[datasets]'`.",
        ) from None
    try:
        with ParquetFile(file) as parquet:
            columns, at = _columns(parquet.schema_arrow, name, wanted), 0
            for group in range(parquet.num_row_groups):
                count = parquet.metadata.row_group(group).num_rows
                if at + count <= start:
                    at += count  # skip the row group without reading it
                    continue
                _require_bounded(parquet.metadata.row_group(group), columns, name)
                for batch in parquet.iter_batches(256, row_groups=[group], columns=columns):
                    for number in range(max(0, start - at), batch.num_rows):
                        row = {column: batch.column(column)[number].as_py() for column in columns}
                        yield partial(_document, row, wanted, name)
                    at += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"data.source: {name} cannot be read: {error}") from error


def _require_bounded(group: Any, columns: Sequence[str], name: str) -> None:
    parts = (group.column(number) for number in range(group.num_columns))
    size = sum(part.total_uncompressed_size for part in parts if part.path_in_schema.split(".")[0] in columns)
    if size > MAX_GROUP_BYTES:
        raise ConfigError(
            f"data.source: a row group of {name} has {size} bytes in {', '.join(columns)}, more than {MAX_GROUP_BYTES}",
            hint="Use a data set with smaller row groups, or a local folder with path:FOLDER.",
        )


def _columns(schema: Any, name: str, wanted: Wanted) -> list[str]:
    """Returns the columns of a Parquet file to read. Raises ConfigError if they are missing, or are not text."""
    if wanted.column is None:
        for columns in CHAT_COLUMNS:
            if {*columns} <= {*schema.names}:
                return [*columns, *(each for each in ("system", "input") if each in schema.names)]
    elif wanted.column in schema.names:
        kind = str(schema.field(wanted.column).type)
        if not wanted.is_chat and not re.match(r"(large_)?(string|binary)|null|dictionary<values=\w*string", kind):
            raise _not_text(name, wanted.column, kind, kind)
        return [wanted.column]
    raise _no_column(name, wanted.column or "messages", schema.names)


def _no_column(name: str, column: str, names: Sequence[str]) -> ConfigError:
    is_talk = column == TEXT_COLUMN and any({*shape} <= {*names} for shape in CHAT_COLUMNS)
    return _column_error(f"{name} has no column {column!r}; it has {', '.join(names)[:400]}", is_talk=is_talk)


def _not_text(name: str, column: str, kind: str, content: str = "") -> ConfigError:
    is_talk = re.search(r"\b(role|from)'?:", content) is not None
    return _column_error(f"the column {column!r} of {name} has the type {kind}, not text", is_talk=is_talk)


def _column_error(what: str, *, is_talk: bool) -> ConfigError:
    hint = "Name a column of text, as path:FILE:COLUMN or huggingface:NAME:::COLUMN, or move the file elsewhere."
    return ConfigError(f"data.source: {what}", hint="For conversations add --labels assistant." if is_talk else hint)


def _document(row: Any, wanted: Wanted, name: str) -> bytes:
    """Converts a row, or a row in JSON, to the bytes of a document. Raises OSError if it is malformed."""
    if row is None:
        raise OSError(errno.EINVAL, f"the row is malformed, or has more than {LINE_BYTES} bytes")
    if isinstance(row, str):
        if wanted.column is None:
            return row.encode(errors="replace")
        try:
            row = json.loads(row)
        except (ValueError, RecursionError):
            raise OSError(errno.EINVAL, "the row is not JSON") from None
    if wanted.column is None:
        return json.dumps(row, default=str).encode()
    if not isinstance(row, dict) or wanted.column not in row:
        raise OSError(errno.EINVAL, f"the row is not an object with {wanted.column!r}")
    value = row[wanted.column]
    if wanted.is_chat:
        return json.dumps({"messages": value}, default=str).encode()
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise _not_text(name, wanted.column, "binary, which is not UTF-8") from None
    if not isinstance(value, str | None):
        raise OSError(errno.EINVAL, f"{wanted.column!r} is of the type {type(value).__name__}, not text")
    return (value or "").encode(errors="replace")
