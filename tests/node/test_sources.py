"""Sources name the same documents on every machine and say plainly what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import node.data.sources as sources
from node.data.sources import DOCUMENT_BYTES, PIECE_BYTES, FileSource, open_source
from protocol.manifest import DataSection
from swarm.errors import ConfigError


def test_a_folder_gives_its_visible_files_sorted_by_relative_name(tmp_path: Path) -> None:
    for name, text in {"b/y.txt": b"2", "a.txt": b"1\xff", "b/.git/z": b"3", ".hidden": b"4", "empty": b""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    source = open_source(DataSection(source=f"path:{tmp_path}"))
    assert list(source.names) == ["a.txt", "b/y.txt"]
    assert [source.read(name) for name in source.names] == [b"1\xff", b"2"]


def test_a_single_file_is_cut_into_documents_that_together_are_the_file(tmp_path: Path) -> None:
    text = bytes(range(256)) * (PIECE_BYTES // 100)
    file = tmp_path / "book.txt"
    file.write_bytes(text)
    source = open_source(DataSection(source=f"path:{file}"))
    assert len(source.names) == -(-len(text) // PIECE_BYTES)
    pieces = {int(name.partition("@")[2] or 0): source.read(name) for name in source.names}
    assert b"".join(pieces[offset] for offset in sorted(pieces)) == text


def test_a_long_file_of_a_folder_is_several_documents(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"ab")
    assert FileSource(tmp_path, [tmp_path / "long"], 1).names == ["long", "long@1"]


def test_the_standard_library_is_python_source_without_tests_and_packages() -> None:
    source = open_source(DataSection())
    assert {"json/decoder.py", "asyncio/base_events.py", "argparse.py"} <= set(source.names)
    assert all(name.partition("@")[0].endswith(".py") for name in source.names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in source.names)
    assert b"def loads" in source.read("json/__init__.py")
    assert len(source.names) > 300
    assert max(len(source.read(name)) for name in source.names) <= DOCUMENT_BYTES


@pytest.mark.parametrize("source", ["path:", "ftp:x", "python", "huggingface:"])
def test_an_unknown_kind_of_source_is_named(source: str) -> None:
    with pytest.raises(ConfigError, match=r"python-stdlib.*path:.*huggingface:"):
        open_source(DataSection(source=source))


def test_a_missing_or_empty_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        open_source(DataSection(source=f"path:{tmp_path}/nowhere"))
    with pytest.raises(ConfigError, match="no text"):
        open_source(DataSection(source=f"path:{tmp_path}"))


def test_a_folder_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILES", 2)
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"x")
    with pytest.raises(ConfigError, match="more than 2 files"):
        open_source(DataSection(source=f"path:{tmp_path}"))


def test_without_the_datasets_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # what an import of a missing library finds
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_source(DataSection(source="huggingface:some/set"))
    assert "skipstone[datasets]" in caught.value.hint
