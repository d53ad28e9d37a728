"""Tokenizers: bytes, and files checked against the manifest."""

from __future__ import annotations

import hashlib
import os
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.tokenizers import ByteTokenizer, FileTokenizer, open_tokenizer
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, ManifestError
from tests.node.small_manifest import small_manifest

tokenizers = pytest.importorskip("tokenizers")


def word_tokenizer(*words: str, doublings: int = 2) -> bytes:
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    replacements = [tokenizers.normalizers.Replace("b", "bb")] * doublings
    tokenizer.normalizer = tokenizers.normalizers.Sequence(replacements)
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


def test_a_tokenizer_file_is_used_and_the_link_to_one_followed(tmp_path: Path) -> None:
    content = word_tokenizer("<unk>", "hello", "world", "<|endoftext|>")
    (tmp_path / "blob").write_bytes(content)
    (tmp_path / "t.json").symlink_to("blob")
    tokenizer = open_tokenizer(manifest_with(tmp_path / "t.json", content), tmp_path / "t.json")
    assert tokenizer.encode(b"world hello \xff").tolist() == [2, 1, 0]
    assert (tokenizer.end_of_document, tokenizer.size) == (3, 4)


def test_another_file_than_the_manifests_is_refused(tmp_path: Path) -> None:
    content = word_tokenizer("<unk>", "a", "</s>")
    (tmp_path / "t.json").write_bytes(content + b" ")
    with pytest.raises(ConfigError, match="has SHA-256"):
        open_tokenizer(manifest_with(tmp_path / "t.json", content), tmp_path / "t.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_tokenizer(manifest_with(tmp_path / "none.json", content), tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "vocabulary", "why"),
    [
        (b"{}", 257, "cannot be used"),
        (word_tokenizer("<unk>", "a", "</s>"), 2, "vocabulary"),
        (word_tokenizer("<unk>", "a"), 257, "no end-of-document token"),
        (word_tokenizer("<unk>", "a", "</s>", doublings=18), 257, "2.62e\\+05 times as long"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, content: bytes, vocabulary: int, why: str) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises((ConfigError, ManifestError), match=why):
        open_tokenizer(manifest_with(tmp_path / "t.json", content, vocabulary), tmp_path / "t.json")


def test_without_the_tokenizers_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_bytes(b"{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        open_tokenizer(manifest_with(tmp_path / "t.json", b"{}"), tmp_path / "t.json")
    assert "skipstone[tokenizers]" in caught.value.hint


def test_what_is_no_regular_file_or_unnamed_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for place in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=r"not a regular file|are not read"):
            open_tokenizer(manifest_with(tmp_path / "t.json", b"{}"), place)
    with pytest.raises(ConfigError, match="unknown on this machine"):
        open_tokenizer(manifest_with(tmp_path / "t.json", b"{}"), None)


PANICS_ON = b"a" * 60 + b"b"


@pytest.fixture
def panicking(tmp_path: Path) -> FileTokenizer:
    """The Rust library ends an endless search by a panic, which is no `Exception` in Python."""
    tokenizer = tokenizers.Tokenizer.from_str(word_tokenizer("<unk>", "a", "</s>").decode())
    pattern = tokenizers.Regex(r"^(a|aa|a?)+$")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    content = tokenizer.to_str().encode()
    (tmp_path / "t.json").write_bytes(content)
    return FileTokenizer(tmp_path / "t.json", hashlib.sha256(content).hexdigest())


def test_a_panic_of_the_library_is_an_error_of_ours(panicking: FileTokenizer) -> None:
    assert panicking.encode(b"b").tolist() == [0]
    with pytest.raises(ConfigError, match=r"PanicException.*retry-limit"):
        panicking.encode(PANICS_ON)


def test_who_interrupts_is_not_taken_for_the_library(panicking: FileTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(panicking, "_tokenizer", types.SimpleNamespace(encode_batch=interrupted))
    with pytest.raises(KeyboardInterrupt):
        panicking.encode(b"a")
