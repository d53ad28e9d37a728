"""Tokenizers: bytes, and files checked against the manifest."""

import base64
import hashlib
import json
import os
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.tokenizers import (
    END_OF_DOCUMENT_NAMES,
    ByteTokenizer,
    FileTokenizer,
    chosen_tokenizer,
    open_tokenizer,
    packed,
    unpacked,
)
from node.export.hugging_face import token_files
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
    tokenizer.add_special_tokens([word for word in words if word in END_OF_DOCUMENT_NAMES])
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
    with pytest.raises(ConfigError, match="cannot read"):
        open_tokenizer(manifest_with(tmp_path / "none.json", content), tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "vocabulary", "why"),
    [
        (b"{}", 257, "cannot be used"),
        (word_tokenizer("<unk>", "a", "</s>"), 2, "vocabulary"),
        (word_tokenizer("<unk>", "a"), 257, "no special token that ends a document"),
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


def test_a_tokenizer_file_that_cuts_or_fills_gives_whole_documents(tmp_path: Path) -> None:
    kept = tokenizers.Tokenizer.from_str(word_tokenizer("<unk>", "a", "</s>").decode())
    kept.enable_truncation(4)
    kept.enable_padding(length=4)
    kept.save(str(tmp_path / "t.json"))
    tokenizer, _ = chosen_tokenizer(tmp_path / "t.json")
    assert [tokenizer.encode(text).tolist() for text in (b"a " * 9, b"a")] == [[1] * 9, [1]]


END = "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, (3,)),
        ({"tokenizer_config": {"eos_token": END}}, (4,)),
        ({"tokenizer_config": {"eos_token": {"content": "<|eot|>"}}, "config": {"eos_token_id": 4}}, (5, 4)),
        ({"generation_config": {"eos_token_id": [5, 4]}, "config": {"eos_token_id": 3}}, (5, 4, 3)),
        ({"config": {"eos_token_id": 2}}, (3,)),  # the default of LlamaConfig, here an ordinary token
        ({"config": {"eos_token_id": [-1, 10**9, True, None, [4], {"content": 4}]}, "special_tokens_map": {}}, (3,)),
    ],
)
def test_the_ends_are_those_of_the_models_folder(tmp_path: Path, files: dict[str, Any], ends: tuple[int, ...]) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(word_tokenizer("<unk>", "a", "b", "[SEP]").decode())
    tokenizer.add_special_tokens([END, "<|eot|>"])
    tokenizer.add_tokens(["</s>", "<|im_end|>"])  # not special, so not an end by its name
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, table in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(table))
    keys = chosen_tokenizer(tmp_path / "tokenizer.json", tmp_path)[1]
    assert keys["ends"] == ends
    data = {f"data__{key}": value for key, value in keys.items()}
    assert open_tokenizer(small_manifest(**data), tmp_path / "tokenizer.json").ends == ends
    chat = small_manifest(**data, data__source="path:talks.jsonl", data__labels="assistant")
    learned = open_tokenizer(chat, tmp_path / "tokenizer.json")
    assert learned.ends == (*ends, 7)
    assert token_files(chat, chat.modules(), learned)["generation_config.json"]["eos_token_id"][-1] == 7
    with pytest.raises(ManifestError, match=r"must be below model\.vocabulary"):
        small_manifest(**data | {"data__beginning": 257})


def test_files_about_tokens_are_kept_within_bounds() -> None:
    files = {
        "config.json": {"eos_token_id": 4, "_name_or_path": "/x"},
        "tokenizer_config.json": {"vocab_file": "", "a": 1},
    }
    strange = {"../evil.json": {}, "additional_chat_templates/../e.jinja": "", "model.py": "", "chat_template.jinja": 1}
    wanted = {"config.json": {"eos_token_id": 4}, "tokenizer_config.json": {"a": 1}}
    assert unpacked(packed(files | strange)) == wanted
    for text in (b'{"a": "' + b" " * 2**24 + b'"}', b'{"chat_template.jinja": "\\ud800"}', b"[" * 10**5, b"[]", b"{"):
        with pytest.raises(ManifestError, match="token_files is invalid"):
            unpacked(base64.b64encode(zlib.compress(text)).decode())
    with pytest.raises(ManifestError, match="token_files is invalid"):
        unpacked("AAAA")
    with pytest.raises(ConfigError, match="too large for the manifest"):
        packed({"chat_template.jinja": "".join(map(chr, range(0x4E00, 0x9000)))})


PANICS_ON = b"a" * 60 + b"b"


@pytest.fixture
def panicking(tmp_path: Path) -> FileTokenizer:
    """The Rust library ends an endless search by a panic, which is no `Exception` in Python."""
    tokenizer = tokenizers.Tokenizer.from_str(word_tokenizer("<unk>", "a", "</s>").decode())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"^(a|aa|a?)+$"), "isolated")
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
