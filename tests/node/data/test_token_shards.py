"""Shards give back the documents they were made of, to whoever owns them; what is no shard is refused."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.cli.manifests import ManifestChanges, changed_manifest
from node.data import sources
from node.data.documents import StreamPosition
from node.data.feed import open_documents
from node.data.sources import READ_AS, ShardWriter, TokenShards, source_at
from node.data.tokenizers import ByteTokenizer
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError
from tests.node.data.test_documents import everything
from tests.node.small_manifest import small_manifest

END = ByteTokenizer.end_of_document


def written(folder: Path, documents: list[list[int]], vocabulary: int = 257, shard_tokens: int = 100) -> Path:
    folder.mkdir()
    ShardWriter(folder, vocabulary, shard_tokens).write(np.array(each, dtype=np.int64) for each in documents)
    return folder


def read_back(folder: Path) -> list[list[int]]:
    source = source_at(folder, TokenShards)
    return [np.frombuffer(source.read(name), READ_AS).tolist() for name in source.names]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30), min_size=1, max_size=12),
    st.integers(1, 60),
    st.sampled_from([2**16, 2**17]),
)
def test_documents_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], shard_tokens: int, vocabulary: int
) -> None:
    folder = written(tmp_path_factory.mktemp("made") / "shards", documents, vocabulary, shard_tokens)
    assert read_back(folder) == documents
    sizes = [path.stat().st_size for path in folder.glob("*.bin")]
    assert sum(sizes) == sum(map(len, documents)) * (2 if vocabulary == 2**16 else 4)
    assert len({*source_at(folder, TokenShards).names}) == len(documents)
    assert not list(folder.glob(".*"))


def test_the_bytes_are_megatron_s(tmp_path: Path) -> None:
    """Written down from its `indexed_dataset.py`; of three sequences the first two are one document there."""
    folder = tmp_path / "shards"
    folder.mkdir()
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 3)
    (folder / "made.idx").write_bytes(header + struct.pack("<3i3q3q", 2, 1, 3, 0, 4, 6, 0, 2, 3))
    (folder / "made.bin").write_bytes(struct.pack("<6H", 1, 2, 3, 4, 5, 60000))
    assert read_back(folder) == [[1, 2, 3], [4, 5, 60000]]
    own = written(tmp_path / "own", [[1, 2], [3], [4, 5, 60000]], 2**16)
    assert (own / "00000.bin").read_bytes() == (folder / "made.bin").read_bytes()
    of_own = struct.pack("<9sQBQQ3i3q4q", b"MMIDIDX\0\0", 1, 8, 3, 4, 2, 1, 3, 0, 4, 6, 0, 1, 2, 3)
    assert (own / "00000.idx").read_bytes() == of_own


def test_a_long_document_is_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_TOKENS", 4)
    found = read_back(written(tmp_path / "shards", [[1], list(range(9)), [2]]))
    assert found == [[1], [0, 1, 2, 3], [4, 5, 6, 7], [8], [2]]


@pytest.mark.parametrize("damage", ["magic", "version", "type", "count", "pointer", "order", "short", "empty", "data"])
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, damage: str) -> None:
    folder = written(tmp_path / "shards", [[1, 2], [3]])
    file = folder / "00000.idx"
    index = bytearray(file.read_bytes())
    at, value = {
        "magic": (0, b"PICK"),
        "version": (9, b"\2"),
        "type": (17, b"\7"),
        "count": (18, b"\xff" * 7),
        "pointer": (42, b"\1"),
        "order": (58, b"\1"),
    }.get(damage, (0, b""))
    index[at : at + len(value)] = value
    file.write_bytes({"short": index[:-1], "empty": index[:20]}.get(damage, index))
    if damage == "data":
        (folder / "00000.bin").write_bytes(b"\0" * 5)
    with pytest.raises(ConfigError, match="00000"):
        source_at(folder, TokenShards)


def shards_manifest(folder: Path) -> Manifest:
    return changed_manifest(small_manifest(), ManifestChanges(source=f"tokens:{folder}"))


def test_the_end_of_a_document_is_added_where_it_is_missing(tmp_path: Path) -> None:
    manifest = shards_manifest(written(tmp_path / "shards", [[1, 2], [3, END]]))
    found = open_documents(manifest).epoch(StreamPosition(), everything)
    assert sorted(fragment.tokens.tolist() for fragment in found) == [[1, 2, END], [3, END]]


def test_other_shards_than_the_manifest_s_and_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "shards", [[1, 300]], 2**16)
    manifest = shards_manifest(folder)
    with pytest.raises(ConfigError, match="has tokens 1 to 300"):
        next(open_documents(manifest).epoch(StreamPosition(), everything))
    (folder / "more.txt").write_text("more")
    with pytest.raises(ConfigError, match="not the text of this run"):
        open_documents(manifest)
