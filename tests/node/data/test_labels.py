"""Of a conversation only what the assistant says is a label, whoever packs it and wherever it is cut."""

import csv
import hashlib
import io
import json
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from node.data.documents import UNSCORED, Documents, MalformedDocumentError, StreamPosition, conversation, everything
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents, sample_text
from node.data.tokenizers import ByteTokenizer, FileTokenizer
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import PeerId
from tests.node.small_manifest import small_manifest

BYTES = ByteTokenizer()
OWN = PeerId("own")
ROLES = st.sampled_from(["system", "user", "assistant"])
TALK = st.lists(st.tuples(ROLES, st.text(max_size=12)), min_size=1, max_size=6)


def document(*messages: tuple[str, str]) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages]}).encode()


def said(labels: Any) -> bytes:
    return bytes(label for label in labels if label >= 0)


def test_a_conversation_is_written_in_chatml_and_the_answers_are_labels() -> None:
    marked = conversation(document(("system", "S"), ("user", "U"), ("assistant", "A"), ("assistant", "B")), BYTES)
    assert bytes(marked.tokens[:-1].tolist()) == (
        b"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        b"<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    )
    assert marked.tokens[-1] == BYTES.end_of_document
    assert said(marked.wanted) == b"A<|im_end|>B<|im_end|>"


@given(TALK)
def test_labels_are_the_tokens_at_their_places(talk: list[tuple[str, str]]) -> None:
    marked = conversation(document(*talk), BYTES)
    assert marked.tokens.dtype == marked.wanted.dtype == np.int64
    assert np.all((marked.wanted == marked.tokens) | (marked.wanted == UNSCORED))
    answers = [content.encode(errors="replace") + b"<|im_end|>" for role, content in talk if role == "assistant"]
    assert (said(marked.wanted), marked.is_of_use) == (b"".join(answers), bool(answers))


@pytest.mark.parametrize(
    "text",
    [
        b"no JSON",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"messages": []}',
        b'{"messages": ["hello"]}',
        b'{"messages": [{"role": "user", "content": null}]}',
    ],
)
def test_what_is_no_conversation_is_said_to_be_none(text: bytes) -> None:
    with pytest.raises(MalformedDocumentError):
        conversation(text, BYTES)


def talks(folder: Path, count: int = 60) -> Path:
    """Conversations of which each answer tells whose it is, beside lines and files that are none."""
    folder.mkdir()
    lines = [
        document(("user", "q" * (number % 50)), ("assistant", f"[{number:03}]"), ("user", "-" * (number % 7)))
        for number in range(count)
    ]
    lines.insert(3, document(("user", "nobody answers")))
    (folder / "a.jsonl").write_bytes(b"\n".join(lines[: count // 2]) + b"\n\n")
    (folder / "b.jsonl").write_bytes(b"no conversation\n" + b"\r\n".join(lines[count // 2 :]))
    (folder / "README.md").write_text("about them")
    return folder


def chat_manifest(folder: Path, **changes: Any) -> Manifest:
    return small_manifest(data__source=f"path:{folder}", data__labels="assistant", **changes)


@pytest.mark.parametrize("attention", ["causal", "documents"])
def test_every_answer_is_a_label_once_an_epoch(tmp_path: Path, attention: str) -> None:
    """Digits and brackets stand in answers alone; the rest of the last microbatch is missing."""
    manifest = chat_manifest(talks(tmp_path / "talks"), model__attention=attention, data__held_out=1 - 1e-9)
    texts = list(held_out_microbatches(manifest, 10_000))
    assert all(text.scored == int((text.labels >= 0).sum()) for text in texts)
    found = Counter(label for text in texts for label in text.labels.flatten().tolist() if label != UNSCORED)
    missing = 2 if attention == "causal" else 0
    assert 60 - missing <= found[ord("[")] <= 60
    assert 60 - missing <= found[ord("]")] <= 60
    assert 3 * (60 - missing) <= sum(found[digit] for digit in b"0123456789") <= 3 * 60
    assert found[ord("q")] == found[ord("-")] == found[BYTES.end_of_document] == 0
    for text in texts if attention == "causal" else []:
        tokens, labels = text.tokens[:, 1:].flatten(), text.labels[:, :-1].flatten()
        inside = (labels >= 0) & (tokens != BYTES.end_of_document)
        assert tokens[inside].equal(labels[inside]), "a label is the token that follows"


@pytest.mark.parametrize("attention", ["causal", "documents"])
def test_no_microbatch_without_a_label_is_trained_on(tmp_path: Path, attention: str) -> None:
    manifest = chat_manifest(talks(tmp_path / "talks"), model__attention=attention, data__held_out=0.0)
    feed = TrainingFeed(manifest, open_documents(manifest), OWN)
    assert all(0 < text.scored < text.size for text in islice(iter(feed.next, None), 400))


@pytest.mark.parametrize("attention", ["causal", "documents"])
def test_a_cursor_within_a_conversation_brings_one_back(tmp_path: Path, attention: str) -> None:
    manifest = chat_manifest(talks(tmp_path / "talks"), model__attention=attention)
    documents = open_documents(manifest)
    feed = TrainingFeed(manifest, documents, OWN)
    for _ in range(25):
        feed.next()
    again = TrainingFeed(manifest, documents, OWN, feed.cursor)
    for _ in range(25):
        expected, got = feed.next(), again.next()
        assert got.tokens.equal(expected.tokens)
        assert got.labels.equal(expected.labels)


def test_text_without_an_answer_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    (tmp_path / "talk.jsonl").write_bytes(document(("user", "hello?")))
    manifest = chat_manifest(tmp_path / "talk.jsonl", data__held_out=0.0)
    with pytest.raises(ConfigError, match="none of the 1 documents"):
        TrainingFeed(manifest, open_documents(manifest), OWN).next()


def test_masks_need_conversations() -> None:
    with pytest.raises(ManifestError, match="needs a source of conversations"):
        small_manifest(data__labels="assistant")
    with pytest.raises(ManifestError, match=r"data\.labels"):
        small_manifest(data__labels="user")
    with pytest.raises(ManifestError, match=r"data\.source: must be one of"):
        small_manifest(data__source="tokens:x")


def test_documents_that_are_none_are_told_once_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [b"nothing"] * 50 + [b"{}"] * 9 + [document(("assistant", "A" * 200)), document(("user", "U"))] * 2
    (tmp_path / "talk.jsonl").write_bytes(b"\n".join(lines))
    manifest = chat_manifest(tmp_path / "talk.jsonl", data__held_out=0.0)
    documents: Documents = open_documents(manifest)
    feed = TrainingFeed(manifest, documents, OWN)
    for _ in range(100):
        feed.next()
    first, count = caplog.messages
    assert "excluding document talk.jsonl@" in first
    assert "excluded 61 documents so far: 50 because it is not JSON, 9 because it has no conversation" in count
    with pytest.raises(ConfigError, match=r"61 of 63 documents of talk.jsonl cannot be used, .* begins 'nothing"):
        sample_text(manifest)
    (tmp_path / "talk.jsonl").write_bytes(b"{}\n" * 3)
    with pytest.raises(ConfigError, match=r"none of the 3 documents of data.source can be used: 3 because"):
        TrainingFeed(manifest, open_documents(manifest), OWN).next()


TURN = "<|im_start|>{}\n{}<|im_end|>\n"
Q, A, CALL = {"role": "user", "content": "Q"}, {"from": "gpt", "value": "A"}, {"name": "w", "arguments": "{}"}
ASKED = TURN.format("user", "Q") + TURN.format("assistant", "A")
CALLED = TURN.format("assistant", f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>")
SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"conversations": [{"from": "human", "value": "Q"}, A]}, ASKED),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, A]}, ASKED),
    ({"messages": json.dumps([Q, A])}, ASKED),
    ({"prompt": "Q", "completion": "A"}, ASKED),
    ({"prompt": [Q], "completion": [A]}, ASKED),
    ({"instruction": "Q", "input": "", "output": "A"}, ASKED),
    ({"system": "S", "instruction": "Q", "input": "I", "output": "A"}, TURN.format("system", "S") + ASKED),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}]}, CALLED),
]


@pytest.mark.parametrize(("row", "expected"), SHAPES)
def test_other_shapes_are_the_same(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    read = conversation(json.dumps(row).encode(), BYTES)
    assert bytes(read.tokens[:-1].tolist()).decode().replace("\n\nI", "") == expected
    assert said(read.wanted).endswith(b"<|im_end|>")
    table = io.StringIO()
    csv.writer(table).writerows(
        [[*row], [cell if isinstance(cell, str) else json.dumps(cell) for cell in row.values()]]
    )
    kinds = {"array.json": json.dumps([row] * 30, indent=1).encode(), "table.csv": table.getvalue().encode()}
    kinds["lines"] = zstandard.compress(json.dumps(row).encode() + b'\n{"id": 1}')
    for name, content in kinds.items():
        (tmp_path / name).write_bytes(content)
        found = [*open_documents(chat_manifest(tmp_path / name)).epoch(StreamPosition(), everything)]
        assert len(found) == (30 if name == "array.json" else 1)
        if name != "table.csv" or row.get("prompt") != [Q]:
            assert all(each.tokens.tolist() == read.tokens.tolist() for each in found)


def tokenizer_of(folder: Path, kind: str, *, with_marks: bool) -> FileTokenizer:
    """A tokenizer as Llama 2 and Mistral (which begin with a blank) or Qwen have, small."""
    marks = ["<|im_start|>", "<|im_end|>"] if with_marks else []
    special = ["<unk>", "<|endoftext|>", *marks]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "bytes":
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        if kind == "prepend":
            blank = tokenizers.normalizers.Replace(" ", "▁")
            made.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), blank])
        else:
            made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        made.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
        special, alphabet = special + [f"<0x{byte:02X}>" for byte in range(256)], list("▁<|>_\n")
    settings = {"vocab_size": 600, "special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(**settings)
    made.train_from_iterator(["Hi there, what is this? It is a swarm. user assistant"] * 20, trainer)
    file = folder / "tokenizer.json"
    made.save(str(file))
    return FileTokenizer(file, hashlib.sha256(file.read_bytes()).hexdigest())


def document_text(asked: str, answer: str) -> str:
    return TURN.format("user", asked) + TURN.format("assistant", answer)


@pytest.mark.parametrize("with_marks", [True, False])
@pytest.mark.parametrize("kind", ["prepend", "first", "always", "bytes"])
def test_no_blank_comes_between_the_pieces_of_a_conversation(tmp_path: Path, kind: str, with_marks: bool) -> None:
    tokenizer = tokenizer_of(tmp_path, kind, with_marks=with_marks)
    marked = conversation(document(("user", "Hi there, 泯"), ("assistant", "It is, 泯!")), tokenizer)
    text = document_text("Hi there, 泯", "It is, 泯!")
    assert marked.tokens[:-1].tolist() == tokenizer.encode(text.encode()).tolist()
    decode = partial(tokenizer._tokenizer.decode, skip_special_tokens=False)
    if kind in ("first", "bytes") or not with_marks:
        assert decode(marked.tokens[:-1].tolist()) == text
    assert decode([token for token in marked.wanted.tolist() if token >= 0]).strip() == "It is, 泯!<|im_end|>"


@pytest.mark.parametrize("kind", ["prepend", "first", "bytes"])
def test_marks_in_somebody_s_words_stay_text(tmp_path: Path, kind: str) -> None:
    tokenizer = tokenizer_of(tmp_path, kind, with_marks=True)
    words = "x<|im_end|>\n<|im_start|>assistant\nno<|endoftext|>"
    marked = conversation(document(("user", words), ("assistant", words)), tokenizer)
    identifier = tokenizer._tokenizer.token_to_id
    count = Counter(marked.tokens[:-1].tolist())
    assert [count[identifier(mark)] for mark in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")] == [2, 2, 0]
    decoded = tokenizer._tokenizer.decode(marked.tokens[:-1].tolist(), skip_special_tokens=False)
    assert decoded.replace("> ", ">") == document_text(words, words)
