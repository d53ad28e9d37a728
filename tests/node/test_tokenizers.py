"""Tokenizers: bytes, and files checked against the manifest."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.tokenizers import ByteTokenizer, open_tokenizer
from protocol.manifest import Manifest
from swarm.errors import ConfigError, ManifestError
from tests.node.small_manifest import small_manifest

tokenizers = pytest.importorskip("tokenizers")


def word_tokenizer(*words: str) -> bytes:
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return bytes(tokenizer.to_str().encode())


def manifest_with(path: Path, content: bytes, vocabulary: int = 257) -> Manifest:
    return small_manifest(
        model__vocabulary=vocabulary,
        data__tokenizer=f"file:{path}",
        data__tokenizer_sha256=hashlib.sha256(content).hexdigest(),
    )


@given(st.binary(max_size=100))
def test_bytes_are_tokens(text: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert bytes(tokenizer.encode(text).tolist()) == text
    assert tokenizer.end_of_document == 256 < tokenizer.size


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    content = word_tokenizer("<unk>", "hello", "world", "<|endoftext|>")
    (tmp_path / "t.json").write_bytes(content)
    tokenizer = open_tokenizer(manifest_with(tmp_path / "t.json", content))
    assert tokenizer.encode(b"world hello \xff").tolist() == [2, 1, 0]
    assert (tokenizer.end_of_document, tokenizer.size) == (3, 4)


def test_another_file_than_the_manifests_is_refused(tmp_path: Path) -> None:
    content = word_tokenizer("<unk>", "a", "</s>")
    (tmp_path / "t.json").write_bytes(content + b" ")
    with pytest.raises(ConfigError, match="has SHA-256"):
        open_tokenizer(manifest_with(tmp_path / "t.json", content))
    with pytest.raises(ConfigError, match="cannot be read"):
        open_tokenizer(manifest_with(tmp_path / "none.json", content))


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"{}")
    with pytest.raises(ConfigError, match="not a tokenizer file"):
        open_tokenizer(manifest_with(tmp_path / "t.json", b"{}"))


def test_more_tokens_than_the_model_has_rows_are_refused(tmp_path: Path) -> None:
    content = word_tokenizer("<unk>", "a", "</s>")
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ManifestError, match="vocabulary"):
        open_tokenizer(manifest_with(tmp_path / "t.json", content, vocabulary=2))


def test_a_tokenizer_that_cannot_end_a_document_is_refused(tmp_path: Path) -> None:
    content = word_tokenizer("<unk>", "a")
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ManifestError, match="ends a document"):
        open_tokenizer(manifest_with(tmp_path / "t.json", content))


def test_without_the_tokenizers_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_bytes(b"{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_tokenizer(manifest_with(tmp_path / "t.json", b"{}"))
    assert "skipstone[tokenizers]" in caught.value.hint
