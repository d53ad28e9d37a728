"""Sources name the same documents on every machine and say plainly what is missing."""

import os
import socket
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from node.cli.manifests import ManifestChanges, changed_manifest
from node.data import files as listing
from node.data.files import LINE_BYTES, MAX_DOCUMENTS, files_below
from node.data.hub import newest_commit
from node.data.sources import DOCUMENT_BYTES, PIECE_BYTES, FileSource, LineSource, open_source, source_at
from protocol.manifest.manifest import DataSection
from swarm.vocabulary.errors import ConfigError, ManifestError
from tests.kit.texts import files_at
from tests.node.hub_on_loopback import COMMIT, NAME, LoopbackHub, serving
from tests.node.small_manifest import small_manifest


def test_a_folder_gives_its_visible_files_sorted_by_relative_name(tmp_path: Path) -> None:
    for name, text in {"b/y.txt": b"2", "a.txt": b"1\xff", "b/.git/z": b"3", ".hidden": b"4", "empty": b""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / "folder").symlink_to(tmp_path / "b")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "socket"))
        source = files_at(tmp_path)
    assert list(source.names) == ["a.txt", "b/y.txt"]
    assert [source.read(name) for name in source.names] == [b"1\xff", b"2"]


def test_a_single_file_is_cut_into_documents_that_together_are_the_file(tmp_path: Path) -> None:
    text = bytes(range(256)) * (PIECE_BYTES // 100)
    file = tmp_path / "book.txt"
    file.write_bytes(text)
    source = files_at(file)
    assert len(source.names) == -(-len(text) // PIECE_BYTES)
    pieces = {int(name.partition("@")[2] or 0): source.read(name) for name in source.names}
    assert b"".join(pieces[offset] for offset in sorted(pieces)) == text


def test_the_standard_library_is_python_source_without_tests_and_packages() -> None:
    source = open_source(DataSection(), None)
    assert {"json/decoder.py", "asyncio/base_events.py", "argparse.py"} <= set(source.names)
    assert all(name.partition("@")[0].endswith(".py") for name in source.names)
    assert not any({"test", "tests", "site-packages"} & set(name.split("/")) for name in source.names)
    assert b"def loads" in source.read("json/__init__.py")
    assert len(source.names) > 300
    assert max(len(source.read(name)) for name in source.names) <= DOCUMENT_BYTES


@pytest.mark.parametrize("source", ["path:", "ftp:x", "python", "huggingface:"])
def test_an_unknown_kind_of_source_is_named(source: str) -> None:
    with pytest.raises(ManifestError, match=r"data.source.*python-stdlib.*path:.*huggingface:"):
        small_manifest(data__source=source)


def test_a_missing_an_empty_or_a_too_full_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        files_at(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no text"):
        files_at(tmp_path)
    monkeypatch.setattr(listing, "MAX_FILES", 2)
    for number in range(3):
        (tmp_path / str(number)).write_bytes(b"x")
    with pytest.raises(ConfigError, match="more than 2 files"):
        files_at(tmp_path)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # what an import of a missing library finds
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_source(DataSection(source="huggingface:some/set", revision="0" * 40, dealt_by="files"), None)
    assert "skipstone[datasets]" in caught.value.hint
    with pytest.raises(ConfigError) as caught:
        newest_commit("some/set")
    assert "--revision" in caught.value.hint


class TestOnlyFilesOfItsOwn:
    @pytest.mark.timeout(10)
    def test_a_fifo_or_a_device_that_is_named_itself_is_refused_at_once(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for place in (tmp_path / "fifo", Path("/dev/zero"), Path("/dev"), Path("/proc/self"), Path("/sys")):
            with pytest.raises(ConfigError):
                files_at(place)
        (tmp_path / "way").symlink_to("/proc")
        with pytest.raises(ConfigError, match="/proc"):
            files_at(tmp_path / "way")

    @pytest.mark.timeout(10)
    def test_what_takes_a_file_s_place_later_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_bytes(b"secret")
        (tmp_path / "text" / "below").mkdir(parents=True)
        for name in ("a", "b", "below/c"):
            (tmp_path / "text" / name).write_bytes(b"text")
        source = files_at(tmp_path / "text")
        (tmp_path / "text" / "a").unlink()
        (tmp_path / "text" / "a").symlink_to(tmp_path / "secret")
        (tmp_path / "text" / "b").unlink()
        os.mkfifo(tmp_path / "text" / "b")
        (tmp_path / "text" / "below").rename(tmp_path / "gone")
        (tmp_path / "text" / "below").symlink_to(tmp_path)
        (tmp_path / "c").write_bytes(b"secret")
        for name in source.names:
            with pytest.raises(OSError, match=r"link|regular"):
                source.read(name)

    def test_a_hidden_folder_that_a_person_names_is_read_without_its_dot_files(self, tmp_path: Path) -> None:
        (tmp_path / ".text").mkdir()
        for name in ("a", ".b"):
            (tmp_path / ".text" / name).write_bytes(b"x")
        assert list(files_at(tmp_path / ".text").names) == ["a"]

    @pytest.mark.skipif(sys.platform != "linux", reason="needs sparse files")
    def test_a_sparse_file_costs_no_memory(self, tmp_path: Path) -> None:
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(PIECE_BYTES * MAX_DOCUMENTS)
        tracemalloc.start()
        try:
            source = files_at(tmp_path / "sparse")
            assert len(source.names) == MAX_DOCUMENTS
            assert source.names[MAX_DOCUMENTS - 1] == f"sparse@{PIECE_BYTES * (MAX_DOCUMENTS - 1)}"
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
        with (tmp_path / "sparse").open("ab") as file:
            file.truncate(15 << 40)
        with pytest.raises(ConfigError, match="more than"):
            files_at(tmp_path / "sparse")

    def test_names_are_those_of_the_files_in_order(self, tmp_path: Path) -> None:
        for name, size in {"b": 3, "a": 1, "a.b": 2}.items():
            (tmp_path / name).write_bytes(b"x" * size)
        names = FileSource(files_below(tmp_path), 1).names
        assert list(names) == ["a", "a.b", "a.b@1", "b", "b@1", "b@2"]
        assert (names[-1], names[1:3], len(names)) == ("b@2", ["a.b", "a.b@1"], 6)
        with pytest.raises(IndexError):
            names[6]


class TestTheManifestsFiles:
    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        (tmp_path / "text").mkdir()
        for name in ("a", "b"):
            (tmp_path / "text" / name).write_bytes(b"12345")
        return tmp_path / "text"

    def section(self, text: Path) -> DataSection:
        return DataSection(source="path:elsewhere", files=files_at(text).listing.section())

    def test_the_same_files_are_opened_wherever_they_lie(self, text: Path, tmp_path: Path) -> None:
        section = self.section(text)
        text.rename(tmp_path / "other")
        assert list(open_source(section, tmp_path / "other").names) == ["a", "b"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda text: (text / "c").write_bytes(b"1"), "has 3 files with 11 bytes in total, the run's text 2 "),
            (lambda text: (text / "a").unlink(), "has 1 files with 5 bytes in total, the run's text 2 with 10"),
            (lambda text: (text / "a").rename(text / "z"), "other names or sizes. Its first files: b, z"),
            (
                lambda text: [(text / "a").write_bytes(b"1234"), (text / "b").write_bytes(b"123456")],
                "other names or sizes",
            ),
        ],
    )
    def test_others_are_refused_with_reason(self, text: Path, change: Callable[[Path], object], message: str) -> None:
        section = self.section(text)
        change(text)
        with pytest.raises(ConfigError, match=message):
            open_source(section, text)

    def test_they_are_of_a_path_alone(self, text: Path) -> None:
        with pytest.raises(ManifestError, match="files must not be given"):
            small_manifest(data__files=self.section(text).files.model_dump())  # type: ignore[union-attr]

    def test_no_path_is_opened_that_nobody_has_named(self) -> None:
        with pytest.raises(ConfigError, match="unknown on this machine"):
            open_source(DataSection(source="path:/etc"), None)


@pytest.mark.parametrize("path", ["//host/share", "\\\\host\\share", "\\\\?\\C:\\x", "/\\host"])
def test_a_path_on_another_machine_is_refused_in_the_manifest(path: str) -> None:
    # Windows would prove to that machine who we are.
    with pytest.raises(ManifestError, match=r"data.source: is a path on another machine"):
        small_manifest(data__source=f"path:{path}")
    with pytest.raises(ManifestError, match=r"data.tokenizer: is a path on another machine"):
        small_manifest(data__tokenizer=f"file:{path}", data__tokenizer_sha256="0" * 64)


@pytest.mark.parametrize(
    "name", ["plain", "../up/x", "/etc/passwd", "a/b/c", "./a/b", "a/..", "a\\b/c", "a/b:c:d:e:f", "https://x/y"]
)
def test_only_an_owner_and_a_name_are_looked_up_on_a_hub(name: str) -> None:
    with pytest.raises(ManifestError, match=r"data.source"):
        small_manifest(data__source=f"huggingface:{name}")


class TestHub:
    def test_a_new_manifest_has_the_newest_commit_or_the_one_that_is_named(self, tmp_path: Path) -> None:
        named = ManifestChanges(source=f"huggingface:{NAME}:config")
        with serving(LoopbackHub({}), tmp_path) as hub:
            data = changed_manifest(small_manifest(), named).data
            assert (data.revision, data.dealt_by) == (COMMIT, "files")
            assert hub.tokens == hub.fetched == [], "without a token"
            hub.unlisted = 1000  # it would answer nothing more
            other = changed_manifest(small_manifest(), replace(named, revision="e" * 40))
        assert other.data.revision == "e" * 40
        again = changed_manifest(other, ManifestChanges(seed=1)).data
        assert (again.revision, again.dealt_by) == ("e" * 40, "files")
        assert changed_manifest(other, ManifestChanges(source="python-stdlib")).data.dealt_by == "documents"

    @pytest.mark.parametrize("more", [{}, {"data__revision": COMMIT}, {"data__dealt_by": "files"}])
    def test_a_data_set_that_would_be_fetched_whole_is_refused(self, more: dict[str, str]) -> None:
        with pytest.raises(ManifestError, match="of the hub is no longer fetched whole; make a new manifest"):
            small_manifest(data__source="huggingface:some/set", **more)

    def test_a_revision_is_a_commit_of_the_hub(self) -> None:
        for source, revision in (("huggingface:some/set", "main"), ("path:x", COMMIT)):
            with pytest.raises(ManifestError, match="revision"):
                small_manifest(data__source=source, data__revision=revision)
        with pytest.raises(ManifestError, match="dealt_by"):
            small_manifest(data__dealt_by="files")


def test_lines_of_all_files_are_documents_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"three\n")
    (tmp_path / "a.jsonl").write_bytes(b"one\r\n\n  \ntwo")
    (tmp_path / "c.txt").write_bytes(b"not asked for\n")
    source = open_source(DataSection(source="path:x", labels="assistant"), tmp_path)
    assert isinstance(source, LineSource)
    assert (list(source.names), source.names[2:]) == (["a.jsonl@0", "a.jsonl@9", "b.jsonl@0"], ["b.jsonl@0"])
    assert [source.read(name).strip() for name in source.names] == [b"one", b"two", b"three"]
    assert source.listing.section() == files_at(tmp_path).listing.section(), "what the manifest names is the same"


def test_one_file_may_be_called_anything_but_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "talk.json@0").write_bytes(b"a\nb\n")
    source = source_at(tmp_path / "talk.json@0", LineSource)
    assert [source.read(name) for name in source.names] == [b"a\n", b"b\n"]
    (tmp_path / "talk.json@0").write_bytes(b"\n \n")
    with pytest.raises(ConfigError, match="no line"):
        source_at(tmp_path, LineSource)


def test_a_line_that_is_too_long_is_left_out_and_does_not_hide_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"x" * LINE_BYTES + b"\n" + b"y" * (2 * LINE_BYTES) + b"\n" + b"z\n")
    source = source_at(tmp_path, LineSource)
    fits, too_long, last = source.names
    assert (source.read(fits), source.read(last)) == (b"x" * LINE_BYTES + b"\n", b"z\n")
    with pytest.raises(OSError, match="more than"):
        source.read(too_long)
