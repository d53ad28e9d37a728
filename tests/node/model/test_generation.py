"""Generation: the past changes nothing but the cost, the seed decides, and `transformers` finds the same."""

import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.cli.generate import _Output
from node.data.local_paths import LocalPathOptions
from node.data.tokenizers import ByteTextStream, ByteTokenizer, WindowTextStream, open_tokenizer
from node.model.blocks import Past
from node.model.decoder import Continuation, Decoder, Sampling, choose
from node.model.initialization import parameters_of
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, StateError
from tests.node.checkpoint.saved_states import CPU, decoder_of, exported, logits_of, noisy_model, save_checkpoint
from tests.node.data.test_tokenizers import word_tokenizer
from tests.node.small_manifest import small_manifest

GREEDY = Sampling(temperature=0)
SEQUENCE = 16


def generate(decoder: Decoder, tokenizer: ByteTokenizer, prompt: list[int], limit: int, how: Sampling) -> list[int]:
    return list(Continuation(decoder, tokenizer, prompt, limit, how).take(limit))


def noisy_decoder(manifest: Manifest) -> Decoder:
    parts = [part for _, parts in noisy_model(manifest).modules() for part in parts]
    return Decoder(manifest, parameters_of(*parts), CPU)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return noisy_decoder(small_manifest())


def without_past(decoder: Decoder, prompt: list[int], limit: int) -> list[int]:
    """Greedy, everything computed anew for each token; the same rule for what the model sees."""
    seen, found = prompt[-SEQUENCE:], list[int]()
    for _ in range(limit):
        found.append(int(decoder.logits(torch.tensor([seen]))[0, -1].argmax()))
        if found[-1] == ByteTokenizer.end_of_document:
            break
        seen = [*(seen[-SEQUENCE // 2 :] if len(seen) == SEQUENCE else seen), found[-1]]
    return found


@pytest.mark.parametrize("prompt", [b"a", b"The quick", b"x" * 15, b"y" * 16, b"a prompt longer than what it sees"])
def test_the_past_changes_nothing(decoder: Decoder, prompt: bytes) -> None:
    tokens = list(prompt)
    found = generate(decoder, ByteTokenizer(), tokens, 40, GREEDY)
    assert found == without_past(decoder, tokens, 40)
    assert found == generate(decoder, ByteTokenizer(), tokens, 40, GREEDY)
    assert len(set(found)) > 1


@pytest.mark.parametrize("stages", [(1, 2), (1,), (2,), ()])
def test_logits_with_a_past_are_those_without(decoder: Decoder, stages: tuple[int, ...]) -> None:
    decoder = decoder.through(stages)
    tokens = [5, 200, 31, 7, 99, 256, 12]
    past = decoder.no_past(len(tokens))
    stepped = [decoder.next_logits(tokens[:3], past), *(decoder.next_logits([token], past) for token in tokens[3:])]
    whole = decoder.logits(torch.tensor([tokens]))[0, 2:]
    torch.testing.assert_close(torch.stack(stepped), whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_part_of_the_model_skips_the_other_stages() -> None:
    model, decoder = noisy_model(small_manifest()), noisy_decoder(small_manifest())
    tokens = torch.tensor([[5, 200, 31]])
    for stages in ((1, 2), (1,), (2,), ()):
        hidden = model.embedding(tokens)
        for stage in stages:
            hidden = model.stacks[stage - 1](hidden)
        part = decoder.through(stages)
        torch.testing.assert_close(part.logits(tokens), model.head.logits(hidden))
        assert part.stages == stages
    assert decoder.stages == (1, 2)


def test_an_empty_prompt_is_the_beginning_of_a_document(decoder: Decoder) -> None:
    begin = [ByteTokenizer.end_of_document]
    assert generate(decoder, ByteTokenizer(), [], 9, GREEDY) == without_past(decoder, begin, 9)


def test_the_seed_decides(decoder: Decoder) -> None:
    def text(seed: int) -> list[int]:
        return generate(decoder, ByteTokenizer(), [65], 30, Sampling(temperature=1.5, seed=seed))

    assert text(1) == text(1)
    assert len({tuple(text(seed)) for seed in range(4)}) > 1


def test_it_ends_with_the_document(decoder: Decoder) -> None:
    for seed in range(40):
        tokens = generate(decoder, ByteTokenizer(), [65], 100, Sampling(temperature=9.0, seed=seed))
        assert 256 not in tokens[:-1]
        if tokens[-1] == 256:
            return
    raise AssertionError("of forty texts none has ended")


def test_ids_above_the_tokenizers_are_never_chosen() -> None:
    decoder = noisy_decoder(small_manifest(model__vocabulary=1000))
    assert max(generate(decoder, ByteTokenizer(), [65], 60, Sampling(temperature=50.0, seed=3))) < 257


class TestChoice:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.3]))

    def chosen(self, sampling: Sampling) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {choose(self.logits, sampling, generator) for _ in range(300)}

    @pytest.mark.parametrize(
        ("sampling", "expected"),
        [
            (Sampling(temperature=0), {1}),
            (Sampling(temperature=1), {0, 1, 2, 3}),
            (Sampling(temperature=1e-9), {1}),
            (Sampling(temperature=1, top_k=2), {1, 3}),
            (Sampling(temperature=1, top_k=99), {0, 1, 2, 3}),
            (Sampling(temperature=1, top_p=0.01), {1}),
            (Sampling(temperature=1, top_p=0.5), {1, 3}),
            (Sampling(temperature=1, top_p=0.8), {1, 2, 3}),
            (Sampling(temperature=1, top_k=3, top_p=0.7), {1, 3}),
        ],
    )
    def test_filters(self, sampling: Sampling, expected: set[int]) -> None:
        assert self.chosen(sampling) == expected

    def test_frequencies_are_the_probabilities(self) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [choose(self.logits, Sampling(temperature=1), generator) for _ in range(4000)]
        assert drawn.count(1) / len(drawn) == pytest.approx(0.4, abs=0.04)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_is_said(self, value: float) -> None:
        with pytest.raises(StateError, match="diverged"):
            choose(torch.tensor([0.0, value]), GREEDY, torch.Generator())

    @pytest.mark.parametrize(
        "values",
        [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}, {"seed": -1}],
    )
    def test_wrong_values(self, values: dict[str, float]) -> None:
        with pytest.raises(ConfigError):
            Sampling(**values)  # type: ignore[arg-type]


def test_a_past_takes_one_at_a_time_and_no_more_than_its_room() -> None:
    past, one, two = Past(3), torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 2, 4)
    past.extend(one, one)
    with pytest.raises(ValueError, match="one token at a time"):
        past.extend(two, two)
    for _ in range(2):
        past.extend(one, one)
    with pytest.raises(ValueError, match="exceed the cache"):
        past.extend(one, one)


@given(st.binary(max_size=60))
def test_pieces_of_bytes_are_the_text(text: bytes) -> None:
    stream = ByteTextStream()
    pieces = [stream.push(token) for token in text]
    assert "".join([*pieces, stream.finish()]) == text.decode(errors="replace")


@given(st.text(max_size=40))
def test_pieces_of_tokens_that_are_parts_of_characters_are_the_text(text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = WindowTextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    pieces = [stream.push(token) for token in text.encode()]
    assert "".join([*pieces, stream.finish()]) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_spaces_between_words_and_tokens_without_text() -> None:
    words = ["the", "cat", "", "sat"]
    stream = WindowTextStream(lambda tokens: " ".join(words[token] for token in tokens if words[token]))
    tokens = [0, 1, *itertools.repeat(2, 20), 3]
    assert "".join([*(stream.push(token) for token in tokens), stream.finish()]) == "the cat sat"


def test_a_mark_that_is_no_token_ends_the_text_and_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    output = _Output(ByteTokenizer(), "<|im_end|>", silent=False)
    assert [output.push(token) for token in b"a <|im<|im_end|>"] == [False] * 15 + [True]
    output.finish(0, 0, (1,), ())
    assert capsys.readouterr().out == "a <|im\n"


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
    exported(checkpoint, tmp_path / "folder", told=LocalPathOptions(tokenizer=tokenizer), **how)
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
    file = tmp_path / "words.json"
    file.write_bytes(word_tokenizer("<unk>", "hello", "world", "!", "<|endoftext|>"))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest = small_manifest(data__tokenizer=f"file:{file}", data__tokenizer_sha256=sha256)
    folder, _ = folder_of(tmp_path, manifest, tokenizer=file)
    assert (folder / "tokenizer.json").read_bytes() == file.read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs("hello strange world!")["input_ids"] == [1, 0, 2, 3]
    assert theirs.eos_token_id == open_tokenizer(manifest, file).end_of_document == 4
    file.unlink()  # the folder has all it needs
    assert open_tokenizer(manifest, folder / "tokenizer.json").encode(b"world").tolist() == [2]
