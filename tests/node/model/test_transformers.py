"""An export in the hands of `transformers`: the same tokens, the same logits, the same greedy text."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from node.data.places import ToldPlaces
from node.data.tokenizers import ByteTokenizer, open_tokenizer
from node.model.decoder import Continuation, Sampling
from protocol.manifest.manifest import Manifest
from tests.node.checkpoint.saved_states import decoder_of, exported, logits_of, noisy_model, save_checkpoint
from tests.node.small_manifest import small_manifest

TEXTS = ["", "hello world", "  spaces \n\t and\r\nlines ", "Grüße, 世界! 🦊", "<|endoftext|> is text", "\x00\x7f\u2028"]


@pytest.fixture(scope="module")
def transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # a folder of one's own needs nobody
    import transformers

    return transformers


def folder_of(tmp_path: Path, manifest: Manifest, tokenizer: Path | None = None, **how: Any) -> tuple[Path, Any]:
    """An exported model, and the model."""
    model = noisy_model(manifest)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", manifest, model)
    exported(checkpoint, tmp_path / "folder", told=ToldPlaces(tokenizer=tokenizer), **how)
    return tmp_path / "folder", model


@pytest.mark.parametrize(
    ("changes", "shard_bytes"),
    [({}, 20_000), ({"model__kv_heads": 4, "model__rope_theta": 5e5}, 10**9), ({"stages__blocks": [0, 3]}, 10**9)],
)
def test_logits_are_the_same(transformers: Any, tmp_path: Path, changes: dict[str, Any], shard_bytes: int) -> None:
    folder, model = folder_of(tmp_path, small_manifest(**changes), shard_bytes=shard_bytes)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.dtype == torch.float32
    tokens = torch.randint(257, (3, 16), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found = theirs(tokens).logits
    assert (found - logits_of(model, tokens)).abs().max().item() <= 1e-4


def test_greedy_text_is_the_same(transformers: Any, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, small_manifest(model__sequence=64, training__inner_tokens=128))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = list(b"The quick")
    found = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 9), max_new_tokens=30, do_sample=False)

    ours = list(Continuation(decoder_of(folder), ByteTokenizer(), prompt, 30, Sampling(temperature=0)).take(30))
    assert found[0, 9:].tolist() == ours


def test_bytes_are_the_same_tokens(transformers: Any, tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path, small_manifest())
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, "".join(map(chr, range(1, 0x500)))]:
        ids = ByteTokenizer().encode(text.encode()).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert (theirs.eos_token_id, theirs.bos_token_id) == (256, 256)
    assert theirs.decode([104, 105, 256], skip_special_tokens=True) == "hi"


def test_a_tokenizer_file_is_the_same_tokenizer(transformers: Any, tmp_path: Path) -> None:
    words = ["<unk>", "hello", "world", "!", "<|endoftext|>"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>"])
    file = tmp_path / "words.json"
    file.write_text(made.to_str())
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest = small_manifest(data__tokenizer=f"file:{file}", data__tokenizer_sha256=sha256)
    folder, _ = folder_of(tmp_path, manifest, tokenizer=file)
    assert (folder / "tokenizer.json").read_bytes() == file.read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("hello strange world!")["input_ids"] == [1, 0, 2, 3]
    assert theirs.eos_token_id == open_tokenizer(manifest, file).end_of_document == 4
    file.unlink()  # the folder has all it needs
    assert open_tokenizer(manifest, folder / "tokenizer.json").encode(b"world").tolist() == [2]
