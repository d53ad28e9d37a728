"""A chat model comes back from a run with the special tokens, chat template and ends that its folder had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from node.cli.manifests import starting_from
from node.data.documents import StreamPosition
from node.data.feed import TrainingFeed, open_documents
from node.data.local_paths import LocalPathOptions
from node.data.tokenizers import FileTokenizer, Tokenizer, open_tokenizer
from node.export.hugging_face import byte_tokenizer
from node.local_swarm.default_manifest import default_manifest
from node.model.decoder import Continuation, Sampling
from node.solo.trainer import SoloTrainer, WholeModel
from node.start.cut_model import CutModel, ModelFolder
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.types import PeerId
from tests.node.checkpoint.saved_states import CPU, decoder_of, exported, save_checkpoint
from tests.node.start.tiny_models import write_model

CHATML: Final = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA: Final = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
)
INST: Final = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
QWEN: Final = {
    "names": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "tokens": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "ends": [258, 256],
    "template": CHATML,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "llama 3.1": {
        "names": ("<|begin_of_text|>", "<|end_of_text|>", "<|start|>", "<|end|>", "<|eot_id|>"),
        "tokens": {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"},
        "ends": [257, 260],
        "beginning": 256,
        "template": LLAMA,
    },
    "qwen2": QWEN,
    "qwen3": QWEN | {"ends": 258},
    "mistral": {
        "names": ("<s>", "</s>", "[INST]", "[/INST]"),
        "tokens": {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "</s>"},
        "ends": 257,
        "beginning": 256,
        "template": INST,
    },
}
TALK: Final = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "It is 2."}]


def write_chat_folder(folder: Path, which: str, says: int) -> None:
    """Writes a folder whose model always says the token `says`."""
    import transformers
    from tokenizers import Tokenizer, processors

    kind = KINDS[which]
    model = write_model(folder, which)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "lm_head", "norm", "embed")):
                parameter.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[says] = 1.0
    first, *_ = ends = kind["ends"] if isinstance(kind["ends"], list) else [kind["ends"]]
    special = {"bos_token_id": kind.get("beginning"), "eos_token_id": first}
    model.config.update(special)
    model.generation_config.update(**special | {"eos_token_id": kind["ends"], "do_sample": True, "temperature": 0.6})
    model.save_pretrained(folder)
    assert len(ends) in (1, 2)
    tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer() | {"added_tokens": []}))
    tokenizer.add_special_tokens(list(kind["names"]))
    if (beginning := kind.get("beginning")) is not None:
        name = kind["names"][0]
        tokenizer.post_processor = processors.TemplateProcessing(f"{name} $A", special_tokens=[(name, beginning)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **kind["tokens"])
    theirs.chat_template = kind["template"]
    theirs.save_pretrained(folder)
    if which == "mistral":  # as transformers 4 wrote it
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "chat_template.jinja").unlink()
        old = {
            "chat_template": INST,
            "name_or_path": "/home/author/secret",
            "auto_map": {"AutoTokenizer": ["x.Y", None]},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config | old))


def started(tmp_path: Path, **data: str) -> Manifest:
    table = default_manifest(0).model_dump()
    table["data"] |= data
    return starting_from(tmp_path / "model", manifest_from_table(table), is_default=True, keeps_blocks=False)


def trained(tmp_path: Path) -> tuple[Manifest, WholeModel]:
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(300)))
    manifest = started(tmp_path, source=f"path:{tmp_path / 'talks.jsonl'}", labels="assistant")
    model = WholeModel(manifest, CPU)
    model.begin(CutModel(manifest, ModelFolder(tmp_path / "model")))
    SoloTrainer(manifest, model, open_documents(manifest)).step(lambda: False)
    return manifest, model


@pytest.mark.parametrize("which", KINDS)
def test_a_chat_model_keeps_its_tokens_its_template_and_its_ends(tmp_path: Path, which: str) -> None:
    kind, folders = KINDS[which], (tmp_path / "model", tmp_path / "folder")
    ends = kind["ends"] if isinstance(kind["ends"], list) else [kind["ends"]]
    write_chat_folder(tmp_path / "model", which, says=ends[-1])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest, model = trained(tmp_path)
    assert set(manifest.data.ends) == set(ends)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", manifest, model)
    told = LocalPathOptions(tokenizer=tmp_path / "model" / "tokenizer.json")
    exported(checkpoint, tmp_path / "folder", told=told)

    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    theirs, ours = (each.generation_config.to_dict() for each in models)
    assert ours == theirs
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(models[1].config, key) == getattr(models[0].config, key), key
    first, second = tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    assert second.special_tokens_map == first.special_tokens_map
    assert second.apply_chat_template(TALK, tokenize=False) == first.apply_chat_template(TALK, tokenize=False)
    assert second("hello")["input_ids"] == first("hello")["input_ids"]
    prompt = torch.tensor([tokenizers[0]("hello")["input_ids"]])
    for each in models:
        said = each.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
        assert said[0, prompt.shape[1] :].tolist() == [ends[-1]]
    opened = open_tokenizer(manifest, tmp_path / "folder" / "tokenizer.json")
    text = Continuation(decoder_of(tmp_path / "folder"), opened, prompt[0].tolist(), 9, Sampling(temperature=0))
    assert list(text.take(9)) == [ends[-1]]
    config = (tmp_path / "folder" / "tokenizer_config.json").read_text()
    assert "auto_map" not in config
    assert "secret" not in config


@pytest.mark.parametrize("attention", ["documents", "causal"])
def test_a_document_begins_as_the_tokenizer_begins_it(tmp_path: Path, attention: str) -> None:
    write_chat_folder(tmp_path / "model", "mistral", says=257)
    (tmp_path / "text").mkdir()
    for number in range(300):
        (tmp_path / "text" / f"{number}.txt").write_text("hello" * (number % 9 + 1))
    table = started(tmp_path, source=f"path:{tmp_path / 'text'}").model_dump()
    table["model"]["attention"] = attention
    manifest = manifest_from_table(table)
    documents = open_documents(manifest)
    for fragment in documents.epoch(StreamPosition(), lambda name: True):
        assert [int(fragment.tokens[0]), int(fragment.tokens[-1])] == [256, 257]
    feed = TrainingFeed(manifest, documents, PeerId("one"))
    first = feed.next()
    if attention == "documents":
        starts = torch.tensor([0, *first.documents]).cumsum(0)[:-1]
        assert {256} == set(first.tokens[0, starts].tolist()), "each document's first input"
        assert not (first.labels == 256).any()
        assert torch.equal(
            TrainingFeed(manifest, documents, PeerId("one"), feed.cursor).next().tokens, feed.next().tokens
        )
    else:
        assert set(first.labels[first.tokens == 257].tolist()) == {256}


def test_the_mark_that_conversations_teach_is_an_end_of_any_tokenizer(tmp_path: Path) -> None:
    write_chat_folder(tmp_path / "model", "qwen2", says=258)
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).unlink()
    configured = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(configured | {"eos_token_id": 256}))
    manifest, model = trained(tmp_path)
    assert manifest.data.ends == (256,)
    file = tmp_path / "model" / "tokenizer.json"
    opened: Tokenizer = open_tokenizer(manifest, file)
    assert isinstance(opened, FileTokenizer)
    assert (opened.ends, opened.learned_end) == ((256, 258), 258)
    exported(
        save_checkpoint(tmp_path / "ck", manifest, model), tmp_path / "folder", told=LocalPathOptions(tokenizer=file)
    )
    stops = json.loads((tmp_path / "folder" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [256, 258]
