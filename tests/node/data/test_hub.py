"""A data set of the hub is read file by file, each fetched when it is due, on a bounded disk, without a token."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from node.data.files import LINE_BYTES
from node.data.hub import WAITS, HubPlace, HubStream, chosen, hub_place
from node.data.hub import rows_of as rows
from swarm.vocabulary.errors import ConfigError
from tests.node.hub_on_loopback import COMMIT, NAME, LoopbackHub, serving


def lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    files = {f"data/train-{number}.jsonl": lines(f"{number}a", f"{number}b") for number in range(8)}
    with serving(LoopbackHub({"README.md": b"#", **files}), tmp_path / "home") as serves:
        yield serves


def opened(kept_bytes: int = 2**20, pauses: list[float] | None = None) -> HubStream:
    return HubStream(NAME, COMMIT, kept_bytes=kept_bytes, pause=([] if pauses is None else pauses).append)


def texts(stream: HubStream, file: str, start: int = 0) -> list[bytes]:
    return [read() for read in stream.rows(file, start)]


def test_a_file_is_fetched_when_it_is_due_and_once(hub: LoopbackHub) -> None:
    stream = opened()
    assert hub.fetched == []
    assert stream.files == tuple(f"data/train-{number}.jsonl" for number in range(8))
    assert texts(stream, "data/train-3.jsonl") == [b"3a", b"3b"]
    assert (texts(stream, "data/train-3.jsonl", 1), hub.fetched) == ([b"3b"], ["data/train-3.jsonl"])
    assert hub.tokens == []


def test_the_bytes_on_disk_are_bounded_and_what_was_not_read_for_longest_goes(hub: LoopbackHub, tmp_path: Path) -> None:
    size = len(hub.files["data/train-0.jsonl"])
    stream = opened(4 * size)
    for file in stream.files:
        assert len(texts(stream, file)) == 2
        on_disk = list((tmp_path / "home").rglob("*.jsonl"))
        assert sum(path.stat().st_size for path in on_disk) <= stream.bytes <= 4 * size
    assert {path.name for path in on_disk} == {f"train-{number}.jsonl" for number in (4, 5, 6, 7)}
    with pytest.raises(ConfigError, match=f"data/train-0.jsonl has {size} bytes, more than a quarter"):
        opened(4 * size - 1)


def test_what_is_being_read_stays_and_is_made_no_room_of(hub: LoopbackHub) -> None:
    stream = opened(4 * len(hub.files["data/train-0.jsonl"]))
    reading = stream.rows("data/train-0.jsonl", 0)
    assert next(reading)() == b"0a"
    for file in stream.files[1:]:
        texts(stream, file)
    assert [read() for read in reading] == [b"0b"]
    assert texts(stream, "data/train-0.jsonl") == [b"0a", b"0b"]
    assert hub.fetched.count("data/train-0.jsonl") == 1


def test_the_next_file_comes_while_one_is_read(hub: LoopbackHub) -> None:
    stream = opened()
    reading = stream.rows("data/train-0.jsonl", 0)
    next(reading)
    stream.expect("data/train-1.jsonl")
    assert texts(stream, "data/train-1.jsonl") == [b"1a", b"1b"], "waits for the one that is under way"
    assert hub.fetched == ["data/train-0.jsonl", "data/train-1.jsonl"]
    hub.failures["data/train-2.jsonl"], hub.status = 1, 404
    stream.expect("data/train-2.jsonl")
    assert texts(stream, "data/train-2.jsonl") == [b"2a", b"2b"], "fetched when it is due"


def test_a_hub_that_fails_is_asked_again_so_often_and_no_more(hub: LoopbackHub) -> None:
    pauses: list[float] = []
    stream = opened(pauses=pauses)
    hub.failures["data/train-0.jsonl"] = 2
    assert (texts(stream, "data/train-0.jsonl"), pauses) == ([b"0a", b"0b"], [*WAITS[:2]])
    pauses.clear()
    hub.failures["data/train-1.jsonl"] = 1000
    with pytest.raises(ConfigError, match=r"cannot get data/train-1.jsonl of some/set from the hub: .*500"):
        texts(stream, "data/train-1.jsonl")
    assert pauses == [*WAITS]
    pauses.clear()
    hub.status = 404
    with pytest.raises(ConfigError, match="cannot get"):
        texts(stream, "data/train-1.jsonl")
    assert pauses == [], "it would say the same again"


def test_a_list_of_files_is_asked_for_again_too(hub: LoopbackHub) -> None:
    pauses: list[float] = []
    hub.unlisted = 2
    assert (len(opened(pauses=pauses).files), pauses) == (8, [*WAITS[:2]])


def test_a_file_of_another_size_than_the_listing_says_is_not_read(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.listed_sizes["data/train-0.jsonl"] = 5
    with pytest.raises(ConfigError, match="instead of 5"):
        texts(opened(), "data/train-0.jsonl")
    assert not [*(tmp_path / "home").rglob("train-0.jsonl")]


def test_another_commit_is_refused_before_anything_is_fetched(hub: LoopbackHub) -> None:
    hub.commit = "f" * 40
    with pytest.raises(ConfigError, match=f"is at {'f' * 40} on the hub, but the manifest requires {COMMIT}"):
        opened()
    assert hub.fetched == []


def test_files_go_with_their_reader_and_those_of_one_that_died_go_later(hub: LoopbackHub, tmp_path: Path) -> None:
    home = tmp_path / "home" / "skipstone"
    first = opened()
    texts(first, "data/train-0.jsonl")
    (home / "dead").mkdir()
    (home / "dead" / "left.jsonl").write_bytes(b"x")
    (home / "dead.lock").touch()
    (home / "without").mkdir()
    second = opened()
    assert sorted(path.suffix for path in home.iterdir()) == ["", "", ".lock", ".lock"], "of the first and the second"
    assert texts(second, "data/train-1.jsonl") == [b"1a", b"1b"]
    assert {path.name for path in home.rglob("*.jsonl")} == {"train-0.jsonl", "train-1.jsonl"}
    del first, second
    assert [*home.iterdir()] == []


def test_a_home_that_cannot_be_written_is_said(hub: LoopbackHub, tmp_path: Path) -> None:
    (tmp_path / "home").write_bytes(b"no folder")
    with pytest.raises(ConfigError, match="cannot create the cache"):
        opened()


class TestRows:
    def test_a_line_that_is_none_keeps_its_number_and_cannot_be_read(self, tmp_path: Path) -> None:
        file = tmp_path / "a.jsonl"
        long = json.dumps({"text": "x" * LINE_BYTES}).encode()
        file.write_bytes(b'{"text": "a"}\n{"other": 1}\nno\n' + long + b'\n{"text": null}\n{"text": "b"}')
        read = [*rows(file, "text", 0, is_chat=False)]
        assert (read[0](), read[4](), read[5]()) == (b"a", b"", b"b")
        for number, why in ((1, "not an object with 'text'"), (2, "not JSON"), (3, "more than")):
            with pytest.raises(OSError, match=why):
                read[number]()
        assert [row() for row in rows(file, "text", 4, is_chat=False)] == [b"", b"b"]

    def test_parquet_by_groups(self, tmp_path: Path) -> None:
        pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow, of the extras `datasets` and `dev`")
        from pyarrow import parquet

        said = [[{"role": "user", "content": str(n)}] for n in range(700)]
        table = pyarrow.table({"text": [str(n) for n in range(699)] + [None], "messages": said, "n": range(700)})
        file = tmp_path / "a.parquet"
        parquet.write_table(table, file, row_group_size=300)
        expected = [b"%d" % n for n in range(699)] + [b""]
        for start in (0, 1, 255, 256, 299, 300, 301, 650, 699, 700):
            assert [read() for read in rows(file, "text", start, is_chat=False)] == expected[start:]
        assert json.loads(next(rows(file, "messages", 600, is_chat=True))()) == {"messages": said[600]}
        with pytest.raises(ConfigError, match="no column 'other'; it has text, messages, n"):
            list(rows(file, "other", 0, is_chat=False))
        file.write_bytes(b"PAR1 no such thing PAR1")
        with pytest.raises(ConfigError, match="cannot be read"):
            list(rows(file, "text", 0, is_chat=False))


class TestChosenFiles:
    def place(self, rest: str = "") -> HubPlace:
        return hub_place(NAME + rest, is_chat=False)

    def test_without_a_word_of_a_split_all_files_are_train(self) -> None:
        names = ["b.parquet", "a.jsonl.gz", ".hidden.jsonl", "x/_y.jsonl", "README.md"]
        assert chosen(self.place(), [], names) == ["a.jsonl.gz", "b.parquet"]
        with pytest.raises(ConfigError, match="no readable file for the split 'test'"):
            chosen(self.place("::test"), [], names)

    def test_words_name_splits(self) -> None:
        names = ["data/train-0.parquet", "data/test-0.parquet", "dev/a.jsonl", "data/latest.jsonl"]
        assert chosen(self.place(), [], names) == ["data/train-0.parquet"]
        assert chosen(self.place("::test"), [], names) == ["data/test-0.parquet"]
        assert chosen(self.place("::validation"), [], names) == ["dev/a.jsonl"]

    def test_the_readme_names_configs(self) -> None:
        configs = [
            {"config_name": "default", "data_files": "en/*.gz"},
            {"config_name": "all", "data_files": ["*.jsonl", "**/*.gz"]},
            {
                "config_name": "parts",
                "data_files": [{"split": "train", "path": ["en/a*"]}, {"split": "test", "path": "en/b*"}],
            },
            {"config_name": "folder", "data_dir": "en"},
        ]
        names = ["en/a.json.gz", "en/b.json.gz", "en/deep/c.json.gz", "top.jsonl"]
        assert chosen(self.place(), configs, names) == names[:2]
        assert chosen(self.place(":all"), configs, names) == names
        assert chosen(self.place(":parts"), configs, names) == names[:1]
        assert chosen(self.place(":parts:test"), configs, names) == names[1:2]
        assert chosen(self.place(":folder"), configs, names) == names[:3]
        with pytest.raises(ConfigError, match="no config 'other'; it has default, all, parts, folder"):
            chosen(self.place(":other"), configs, names)
        with pytest.raises(ConfigError, match="several configs and no default"):
            chosen(self.place(), configs[1:], names)

    def test_other_kinds_of_files_are_refused(self, hub: LoopbackHub) -> None:
        hub.configs = [{"config_name": "default", "data_files": "*.csv"}]
        hub.files["a.csv"] = b"text"
        with pytest.raises(ConfigError, match=r"a\.csv .* has none of the suffixes \.parquet") as caught:
            opened()
        assert "Parquet" in caught.value.hint

    def test_what_a_stranger_wrote_there_may_be_anything(self, hub: LoopbackHub) -> None:
        for configs in ([3], [{"data_files": {"a": 1}}], [{"data_files": None}], [{"config_name": [], "data_dir": 4}]):
            hub.configs = configs  # type: ignore[assignment]
            with suppress(ConfigError):
                assert opened().files
