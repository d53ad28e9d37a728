"""A stranger's tokenizer file is tried in a process of its own before it is opened."""

import json
from typing import Any

import pytest

from node.data import tokenizer_trial
from node.data.tokenizer_trial import fault_of

GPT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def file(**keys: Any) -> bytes:
    table: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "decoder"))
    model = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model} | table | keys).encode()


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def nested(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(depth):
        part = {"type": "Sequence", "normalizers": [part]}
    return part


def test_usual_files_pass() -> None:
    assert fault_of(file()) is None
    assert fault_of(file(pre_tokenizer=split_by(GPT), normalizer=nested(3))) is None


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"pre_tokenizer": split_by("a*(?=[^a])")}, "more than 2 s"),  # grows with the square of the text's length
        ({"pre_tokenizer": split_by("(a+)+b")}, "Regex"),
        ({"normalizer": nested(200)}, "recursion"),
        ({"model": {"type": "x"}}, "did not match"),
    ],
)
def test_files_that_hang_or_crash_do_not(monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], why: str) -> None:
    monkeypatch.setattr(tokenizer_trial, "CPU_S", 2)
    assert why in str(fault_of(file(**keys)))
