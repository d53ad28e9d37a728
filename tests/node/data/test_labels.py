"""Of a conversation only what the assistant says is a label, whoever packs it and wherever it is cut."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.documents import UNSCORED, Documents, MalformedDocumentError, conversation
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.tokenizers import ByteTokenizer
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
    assert said(marked.wanted) == b"".join(answers)
    assert marked.is_of_use == bool(answers)


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
    with pytest.raises(ManifestError, match="which tokens is not"):
        small_manifest(data__source="tokens:x", data__labels="assistant")


def test_of_many_documents_that_are_none_a_bounded_number_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [b"nothing"] * 150 + [document(("assistant", "A" * 20_000))]
    (tmp_path / "talk.jsonl").write_bytes(b"\n".join(lines))
    manifest = chat_manifest(tmp_path / "talk.jsonl", data__held_out=0.0)
    documents: Documents = open_documents(manifest)
    TrainingFeed(manifest, documents, OWN).next()
    assert len(caplog.records) == 100
