"""A chat model comes back from a run with the special tokens, chat template and ends that its folder had."""

import json
from pathlib import Path
from typing import Final

import pytest
import torch

from node.cli.manifests import starting_from
from node.data.feed import TrainingFeed, open_documents
from node.data.local_paths import LocalPathOptions
from node.data.tokenizers import open_tokenizer
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
LLAMA: Final = "{{ bos_token }}{% for m in messages %}{{ m.role }}\n\n{{ m.content }}<|eot_id|>{% endfor %}"
QWEN: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Special tokens from 256 on, ends, whether the first special token begins each text, and the template.
KINDS: Final[dict[str, tuple[tuple[str, ...], list[int], bool, str]]] = {
    "llama 3.1": (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), [258, 257], True, LLAMA),
    "qwen2": (QWEN, [258, 256], False, CHATML),
    "qwen3": (QWEN, [258], False, CHATML),
    "mistral": (("<s>", "</s>"), [257], True, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
}
TALK: Final = [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "It is 2."}]


def write_chat_folder(folder: Path, which: str) -> None:
    """Writes a folder whose model always says the last of its ends."""
    import transformers
    from tokenizers import Tokenizer, processors

    names, ends, begins, template = KINDS[which]
    model = write_model(folder, which)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "lm_head", "norm", "embed")):
                parameter.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[ends[-1]] = 1.0
    special = {"bos_token_id": 256 if begins else None, "eos_token_id": ends[0]}
    model.config.update(special)
    stops = ends if len(ends) > 1 else ends[0]
    model.generation_config.update(**special | {"eos_token_id": stops, "do_sample": True, "temperature": 0.6})
    model.save_pretrained(folder)
    tokenizer = Tokenizer.from_str(json.dumps(byte_tokenizer() | {"added_tokens": []}))
    tokenizer.add_special_tokens(list(names))
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(f"{names[0]} $A", special_tokens=[(names[0], 256)])
    tokens = {"eos_token": names[ends[0] - 256], "bos_token": names[0] if begins else None, "pad_token": names[1]}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    theirs.chat_template = template
    theirs.save_pretrained(folder)
    if which == "mistral":  # as transformers 4 wrote it
        file = folder / "tokenizer_config.json"
        old = {"chat_template": template, "name_or_path": "/secret", "auto_map": {"AutoTokenizer": ["x.Y", None]}}
        file.write_text(json.dumps(json.loads(file.read_text()) | old))
        (folder / "chat_template.jinja").unlink()


def started(tmp_path: Path, **data: str) -> Manifest:
    table = default_manifest(0).model_dump()
    table["data"] |= data
    return starting_from(tmp_path / "model", manifest_from_table(table), is_default=True, keeps_blocks=False)


@pytest.mark.parametrize("which", KINDS)
def test_a_chat_model_keeps_its_tokens_its_template_and_its_ends(tmp_path: Path, which: str) -> None:
    folders, end = (tmp_path / "model", tmp_path / "folder"), KINDS[which][1][-1]
    write_chat_folder(folders[0], which)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(300)))
    manifest = started(tmp_path, source=f"path:{tmp_path / 'talks.jsonl'}", labels="assistant")
    model = WholeModel(manifest, CPU)
    model.begin(CutModel(manifest, ModelFolder(folders[0])))
    SoloTrainer(manifest, model, open_documents(manifest)).step(lambda: False)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", manifest, model)
    exported(checkpoint, folders[1], told=LocalPathOptions(tokenizer=folders[0] / "tokenizer.json"))

    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    first, second = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    assert models[1].generation_config.to_dict() == models[0].generation_config.to_dict()
    configs = [(m.config.bos_token_id, m.config.eos_token_id, m.config.pad_token_id) for m in models]
    assert (configs[0], second.special_tokens_map) == (configs[1], first.special_tokens_map)
    assert second.apply_chat_template(TALK, tokenize=False) == first.apply_chat_template(TALK, tokenize=False)
    prompt = second("hello")["input_ids"]
    assert prompt == first("hello")["input_ids"]
    for each in models:
        said = each.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=9)
        assert said[0, len(prompt) :].tolist() == [end]
    opened = open_tokenizer(manifest, folders[1] / "tokenizer.json")
    assert list(Continuation(decoder_of(folders[1]), opened, prompt, 9, Sampling(temperature=0)).take(9)) == [end]
    assert not {"auto_map", "name_or_path"} & json.loads((folders[1] / "tokenizer_config.json").read_text()).keys()


def test_a_document_begins_as_the_tokenizer_begins_it(tmp_path: Path) -> None:
    write_chat_folder(tmp_path / "model", "mistral")
    (tmp_path / "text").mkdir()
    for number in range(300):
        (tmp_path / "text" / f"{number}.txt").write_text("hello" * (number % 9 + 1))
    packed = started(tmp_path, source=f"path:{tmp_path / 'text'}")
    causal = manifest_from_table(packed.model_dump() | {"model": packed.model.model_dump() | {"attention": "causal"}})
    feeds = [TrainingFeed(manifest, open_documents(manifest), PeerId("one")) for manifest in (packed, causal)]
    documents, rows = feeds[0].next(), feeds[1].next()
    assert set(documents.tokens[0, torch.tensor([0, *documents.documents]).cumsum(0)[:-1]].tolist()) == {256}
    assert not (documents.labels == 256).any()
    again = TrainingFeed(packed, open_documents(packed), PeerId("one"), feeds[0].cursor)
    assert torch.equal(again.next().tokens, feeds[0].next().tokens)
    assert set(rows.labels[rows.tokens == 257].tolist()) == {256}
