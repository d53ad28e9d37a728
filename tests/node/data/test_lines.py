"""Every line with something in it is a document, read where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.data.files import LINE_BYTES
from node.data.sources import files_at, lines_at
from swarm.vocabulary.errors import ConfigError


def test_lines_of_all_files_are_documents_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"three\n")
    (tmp_path / "a.jsonl").write_bytes(b"one\r\n\n  \ntwo")
    (tmp_path / "c.txt").write_bytes(b"not asked for\n")
    source = lines_at(tmp_path)
    assert list(source.names) == ["a.jsonl@0", "a.jsonl@9", "b.jsonl@0"]
    assert source.names[1:] == ["a.jsonl@9", "b.jsonl@0"]
    assert [source.read(name).strip() for name in source.names] == [b"one", b"two", b"three"]
    assert source.listing.section() == files_at(tmp_path).listing.section(), "what the manifest names is the same"


def test_one_file_may_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "talk.json@0").write_bytes(b"a\nb\n")
    source = lines_at(tmp_path / "talk.json@0")
    assert [source.read(name) for name in source.names] == [b"a\n", b"b\n"]


def test_a_line_that_is_too_long_is_left_out_and_does_not_hide_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x" * LINE_BYTES + b"\n" + b"y" * (2 * LINE_BYTES) + b"\n" + b"z\n")
    source = lines_at(tmp_path)
    fits, too_long, last = source.names
    assert source.read(fits) == b"x" * LINE_BYTES + b"\n"
    assert source.read(last) == b"z\n"
    with pytest.raises(OSError, match="more than"):
        source.read(too_long)


def test_a_place_without_a_line_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match="no line"):
        lines_at(tmp_path)
    with pytest.raises(ConfigError, match="no file or folder"):
        lines_at(tmp_path / "none")
