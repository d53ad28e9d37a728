"""Files of text are recognised by their content, read as rows or as text, or refused by name."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

from node.__main__ import app
from node.data.documents import StreamPosition, everything
from node.data.feed import TrainingFeed, open_documents, sample_text
from node.data.row_files import rows_of
from node.data.sources import PIECE_BYTES, FileStream, open_source
from protocol.manifest.manifest import DataSection, Manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId
from tests.kit.texts import files_at
from tests.node.small_manifest import small_manifest

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extras `datasets` and `dev`")

TEXTS = [f'Text {number}, "grün" 泯\nof two lines' for number in range(40)]
NOISE = random.Random(1).randbytes(9000).replace(b"\0", b"x")
WESTERN = ("Grüße aus Köln, " * 40).encode("latin-1")


def parquet(rows: dict[str, list[Any]], **options: Any) -> bytes:
    from pyarrow.parquet import write_table

    file = io.BytesIO()
    write_table(pyarrow.table(rows), file, **options)
    return file.getvalue()


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def table(delimiter: str) -> bytes:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([("id", "text"), *enumerate(TEXTS)])
    return file.getvalue().encode()


def zipped(files: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


ROWS = lines([{"id": number, "text": text} for number, text in enumerate(TEXTS)])
ARRAY = json.dumps([{"text": text, "more": {"a": ["]", '"}']}} for text in TEXTS], indent=1).encode()
PLAIN = "\n".join(TEXTS).encode()
OF_ROWS = {
    "lines.jsonl": ROWS,
    "unnamed": b"\n" + ROWS,
    "gzip.jsonl.gz": gzip.compress(ROWS[:900]) + gzip.compress(ROWS[900:]),
    "zstandard.zst": zstandard.compress(ROWS),
    "bzip2": bz2.compress(ROWS),
    "xz.txt": lzma.compress(ROWS[:900]) + lzma.compress(ROWS[900:]),
    "array.json": ARRAY,
    "array.bin": gzip.compress(ARRAY),
    "table.csv": table(","),
    "table.tsv": table("\t"),
    "table.txt": table(";"),
    "rows.parquet": parquet({"text": TEXTS, "id": list(range(40))}, row_group_size=7),
    "wide.jsonl": ROWS.decode().encode("utf-16"),
    "archive.zip": zipped({"a/b": ROWS}),
}
OF_TEXT = {
    "book.txt": PLAIN,
    "mark.txt": b"\xef\xbb\xbf" + PLAIN,
    "wide.txt": PLAIN.decode().encode("utf-16"),
    "wide_be.txt": b"\xfe\xff" + PLAIN.decode().encode("utf-16-be"),
    "book.gz": gzip.compress(PLAIN),
    "book.zip": zipped({"book": PLAIN}),
}


def manifest_of(place: Path | str, **changes: Any) -> Manifest:
    return small_manifest(data__source=f"path:{place}", data__held_out=0.0, **changes)


def texts(place: Path | str, **changes: Any) -> list[str]:
    read = open_documents(manifest_of(place, **changes)).epoch(StreamPosition(), everything)
    return [bytes(fragment.tokens[:-1].tolist()).decode() for fragment in read]


@pytest.mark.parametrize("name", OF_ROWS)
def test_each_kind_of_rows_gives_its_column(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(OF_ROWS[name])
    assert (texts(tmp_path / name), texts(f"{tmp_path / name}:text")) == (TEXTS, TEXTS)
    for start in (0, 1, 7, 39, 40):
        assert [read().decode() for read in rows_of(tmp_path / name, "text", start, is_chat=False)] == TEXTS[start:]


@pytest.mark.parametrize("name", OF_TEXT)
def test_each_kind_of_plain_text_is_the_same_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(OF_TEXT[name])
    assert texts(tmp_path / name) == [PLAIN.decode()]


def test_a_mixed_folder_has_the_documents_of_its_files_whoever_reads_them(tmp_path: Path) -> None:
    for name, content in {**OF_ROWS, **OF_TEXT, "logo.png": b"\x89PNG\r\n"}.items():
        (tmp_path / name).write_bytes(content)
    expected = sorted(TEXTS * len(OF_ROWS) + [PLAIN.decode()] * len(OF_TEXT))
    assert sorted(texts(tmp_path)) == expected
    manifest = manifest_of(tmp_path)
    found = sample_text(manifest)
    assert found.files_left_out == {"logo.png": "a PNG image"}
    assert (found.documents, found.all_tokens) == (len(expected), found.tokens)
    names, nodes = {f"{file}@{row}" for file in OF_ROWS for row in range(40)}, (PeerId("a"), PeerId("b"))
    feeds = [TrainingFeed(manifest, open_documents(manifest), own) for own in nodes]
    for feed in feeds:
        feed.next(nodes)
    first, second = ({name for name in names if feed._is_mine(name)} for feed in feeds)
    assert (first | second, first & second) == (names, set())


def test_plain_text_keeps_its_names_and_order_beside_what_is_no_text(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.py", "settings.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": {}}[1:]' if name == "b/c.py" else "{}\nprint()\n")
    source = open_source(DataSection(source=f"path:{tmp_path}"), tmp_path)
    assert isinstance(source, type(files_at(tmp_path)))
    assert [*source.names] == [*files_at(tmp_path).names]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\x89PNG\r\n\x1a\n", "a.txt cannot be used: it is a PNG image"),
        ("a.txt", b"%PDF-1.7", "a PDF document"),
        ("a.txt", b"some\0bytes", "a NUL byte at offset 4"),
        ("a.txt", "wide".encode("utf-16-le"), "UTF-16 without"),
        ("a.txt", NOISE, "a.txt is not UTF-8.*at byte .*probably binary"),
        ("a.txt", b"x" * 70 + WESTERN, "a.txt is not UTF-8.*the first at byte 72.*WINDOWS-1252"),
        ("a.txt", ("泯诞岭" * 40).encode("gb18030"), "GB18030"),
        ("a.txt", b"a\n" * 40_000 + WESTERN, r"a.txt@65536 is not UTF-8"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.txt", b"", "a.txt contains no text"),
        ("a.jsonl", lines([{"body": "x", "id": 1}]), "a.jsonl has no column 'text'; it has body, id"),
        ("a.csv", b"id,body\n1,x\n", "a.csv has no column 'text'; it has id, body"),
        ("a.parquet", parquet({"body": ["x"]}), "a.parquet has no column 'text'; it has body"),
        ("a.jsonl", lines([{"text": ["a", "b"]}]), "'text' of a.jsonl has the type list"),
        ("a.jsonl", lines([{"text": 3}]), "'text' of a.jsonl has the type int"),
        ("a.jsonl", lines([{"text": "x"}, *[{"id": 1}] * 3]), "3 of 4 documents of a.jsonl cannot be used"),
        ("a.parquet", parquet({"text": [["a", "b"]]}), r"'text' of a.parquet has the type list<element: string>"),
        ("a.parquet", parquet({"text": [{"raw": "a"}]}), "has the type struct"),
        ("a.parquet", parquet({"text": [1.5]}), "has the type double"),
        ("a.parquet", parquet({"text": [b"bytes \xff"]}), "'text' of a.parquet has the type binary"),
        ("a.jsonl", lines([{"text": [{"role": "user"}]}]), "--labels assistant"),
        ("a.parquet", parquet({"text": [[{"role": "user"}]]}), "--labels assistant"),
        ("a.gz", gzip.compress(random.Random(2).randbytes(5000))[:2000], "cannot decompress a.gz"),
        ("a.xz", lzma.compress(PLAIN)[:-20], "cannot decompress a.xz"),
        ("a.zip", zipped({"[Content_Types].xml": b"x", "a": b"x"}), "an Office document"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        sample_text(manifest_of(tmp_path / name))
    assert re.search(message, f"{caught.value} {caught.value.hint}")


def test_a_folder_of_images_is_refused(tmp_path: Path) -> None:
    for name, content in {"a.png": b"\x89PNG", "b.png": b"\x89PNG", "c.txt": b"text"}.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.png cannot be used: it is a PNG image \(2 of 3 files"):
        sample_text(manifest_of(tmp_path))


def test_what_new_says_of_its_text(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "\x1b[31mQ"}, {"role": "assistant", "content": "A"}]}] * 30
    (tmp_path / "a.jsonl").write_bytes(lines([*rows, {"id": 1}, {"id": 2}]))
    (tmp_path / "logo.png").write_bytes(b"\x89PNG")
    words = ("new", str(tmp_path / "run.toml"), "--data", f"path:{tmp_path}", "--labels", "assistant")
    said = CliRunner().invoke(app, [*words, "--identity", str(tmp_path / ".key")]).output
    assert "30 documents with 2,070 tokens read; in all about 2,070 tokens: 296.8 epochs" in said
    assert "begins: <|im_start|>user  [31mQ<|im_end|> <|im_start|>assistant A<|im_end|>" in said
    assert "The run repeats this small text 297 times" in said
    assert "left out: 6.2% of the documents read (2 because it has no conversation in `messages`" in said
    assert "left out: 1 files that are not such text: logo.png (a PNG image)" in said


def test_a_column_is_named_after_the_path(tmp_path: Path) -> None:
    (tmp_path / "a:b.csv").write_bytes(b"text,body\nx,y\nz,w\n")
    assert texts(tmp_path / "a:b.csv") == ["x", "z"]
    assert texts(f"{tmp_path / 'a:b.csv'}:body") == texts(f"{tmp_path}:body") == ["y", "w"]


def test_letters_and_lines_are_not_cut(tmp_path: Path) -> None:
    for name, text in {"a": "泯诞岭箜" * 9000, "b": "one line of many 泯\n" * 5000}.items():
        (tmp_path / name).write_text(text)
        source = files_at(tmp_path / name)
        pieces = [source.read(each).decode() for each in source.names]
        assert "".join(pieces) == text
        assert len(pieces) == -(-len(text.encode()) // PIECE_BYTES)
        assert all(piece.endswith("\n") for piece in pieces) == (name == "b")
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        assert "".join(texts(tmp_path / f"{name}.gz")) == text


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "' + b"a" * 30_000_000 + b'"}\n' + lines([{"text": "ok"}] * 20),
        b'[{"text": "' + b"a" * 30_000_000 + b'"}, ' + b",".join([b'{"text": "ok"}'] * 20) + b"]",
        b'id,text\n1,"' + b"a" * 30_000_000 + b'"\n' + b"1,ok\n" * 20,
    ],
)
def test_a_bomb_costs_no_memory(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(content, 1))
    source = open_source(DataSection(source=f"path:{tmp_path}"), tmp_path)
    assert isinstance(source, FileStream)
    found = []
    tracemalloc.start()
    for read in source.rows("a.gz", 0):
        try:
            found.append(read())
        except OSError:
            continue
    assert tracemalloc.get_traced_memory()[1] < 12 * 2**20
    tracemalloc.stop()
    assert found == [b"ok"] * 20
