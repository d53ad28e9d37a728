"""What is in a model's folder is believed only where it fits: everything else is refused with a sentence."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from node.cli.manifests import starting_from
from node.dial.dial import spread
from node.local_swarm.default_manifest import default_manifest
from node.model.shapes import EMBEDDING, HEAD
from node.start.cut_model import INDEX, SINGLE, CutModel, ModelFolder, model_table, open_start
from protocol.manifest.manifest import Manifest, manifest_from_table
from protocol.manifest.signing import run_id_of
from swarm.vocabulary.errors import ConfigError, ManifestError
from swarm.vocabulary.types import ModuleId
from tests.node.start.tiny_models import write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model")
    return tmp_path / "model"


def started(folder: Path) -> Manifest:
    return starting_from(folder, default_manifest(0), is_default=True, keeps_blocks=False)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def norm(folder: Path, value: torch.Tensor) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": value}))


def configure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))


HUGE_HEADER = (2**40).to_bytes(8, "little")


def write(folder: Path, change: Callable[[bytes], bytes]) -> None:
    (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))


def make_a_pipe(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 988097824\n"


def index(folder: Path, text: str) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(text)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: write(f, lambda data: data[:-100]), r"cannot read .*model\.safetensors"),
        (lambda f: write(f, lambda data: HUGE_HEADER + data[8:]), "the header has 1099511627776 bytes"),
        (lambda f: (f / SINGLE).write_text(POINTER), "model.safetensors is a Git LFS pointer"),
        (lambda f: (f / "config.json").write_text(POINTER), "config.json is a Git LFS pointer"),
        (lambda f: (f / "tokenizer.json").write_text(POINTER), "tokenizer.json is a Git LFS pointer"),
        (lambda f: index(f, POINTER), "index.json is a Git LFS pointer"),
        (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "has only pickled weights, which could run code"),
        (make_a_pipe, "cannot read"),
        (lambda f: (f / SINGLE).unlink(), "has no model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "cannot read .*config.json"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("x" * 2_000_000), "larger than"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: rewrite(f, lambda t: t.pop("model.norm.weight")), "has no parameter model.norm.weight"),
        (lambda f: rewrite(f, lambda t: t.update({"model.extra": torch.ones(1)})), "has a parameter model.extra"),
        (lambda f: norm(f, torch.ones(31)), r"model.norm.weight is \(31,\), but config.json needs \(32,\)"),
        (lambda f: norm(f, torch.ones(32, dtype=torch.int8)), "model.norm.weight has type I8"),
        (lambda f: norm(f, torch.full((32,), float("nan"))), "model.norm.weight has infinite or NaN values"),
        (lambda f: index(f, '{"weight_map": {"a": "../e.safetensors"}}'), "not a safetensors file of this"),
        (lambda f: index(f, '{"weight_map": {"a": "a.bin"}}'), "not a safetensors file of this"),
        (lambda f: index(f, "{}"), "does not map parameters to files"),
        (lambda f: configure(f, model_type="gpt2"), "model type 'gpt2'"),
        (lambda f: configure(f, hidden_act="gelu"), "activation 'gelu'"),
        (lambda f: configure(f, mlp_bias=True), "mlp_bias"),
        (lambda f: configure(f, quantization_config={}), "quantized weights are not supported"),
        (lambda f: configure(f, model_type="qwen2", use_sliding_window=True, max_window_layers=3), "sliding window"),
        (lambda f: configure(f, model_type="qwen3", layer_types=["sliding_attention"] * 4), "sliding window"),
        (lambda f: configure(f, rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rotary scaling 'yarn'"),
        (lambda f: configure(f, partial_rotary_factor=0.5), "partial_rotary_factor"),
        (lambda f: configure(f, hidden_size="32"), "hidden_size must be a whole number above 0"),
        (lambda f: configure(f, hidden_size=2**40), "hidden_size must be a whole number above 0"),
        (lambda f: configure(f, num_hidden_layers=5), "has no parameter model.layers.4"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(folder)
    with pytest.raises(ConfigError, match=said):
        started(folder)


def test_sizes_that_no_manifest_allows_are_refused(folder: Path) -> None:
    configure(folder, vocab_size=2_000_000)
    with pytest.raises(ManifestError, match=r"model\.vocabulary"):
        started(folder)
    configure(folder, vocab_size=256)
    with pytest.raises(ManifestError, match=r"tokenizer.json has 257 tokens, but the model only 256"):
        started(folder)


def test_a_row_is_never_longer_than_a_sliding_window(folder: Path) -> None:
    configure(folder, model_type="mistral", sliding_window=64)
    assert started(folder).model.sequence == 64
    table = default_manifest(0).model_dump()
    table["model"] |= model_table(json.loads((folder / "config.json").read_text()), 96)
    with pytest.raises(ManifestError, match=r"sequence \(96\) must not be more than sliding_window \(64\)"):
        manifest_from_table(table)


def test_a_folder_of_links_to_another_place_is_read(folder: Path) -> None:
    whole = started(folder)
    for file in list(folder.iterdir()):
        file.rename(folder.parent / f"blob-{file.name}")
        file.symlink_to(f"../blob-{file.name}")
    assert started(folder) == whole


def test_a_single_file_is_read_before_an_old_index(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = started(folder).start
    save_file({name: tensor + 1 for name, tensor in load_file(folder / SINGLE).items()}, folder / "old.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"a": "old.safetensors"}}')
    assert started(folder).start == whole
    assert f"reading {SINGLE}" in caplog.text
    (folder / "old.safetensors").unlink()
    assert started(folder).start == whole


def test_a_tied_matrix_is_read_from_the_embedding_or_the_head(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, "qwen2, tied")
    whole = started(folder)
    rewrite(folder, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    assert started(folder) == whole
    rewrite(folder, lambda t: t.pop(EMBEDDING))
    assert started(folder) == whole
    rewrite(folder, lambda t: t.update({EMBEDDING: t[HEAD] + 1}))  # transformers does not tie what differs
    assert not started(folder).model.tied_embeddings
    configure(folder, tie_word_embeddings=False)
    rewrite(folder, lambda t: t.pop(EMBEDDING))
    with pytest.raises(ConfigError, match=f"has no parameter {EMBEDDING}"):
        started(folder)


@pytest.mark.parametrize(
    "unused",
    [
        {"max_window_layers": 4},
        {},
        {"sliding_window": None, "max_window_layers": 0},
        {"layer_types": ["full_attention"]},
    ],
)
def test_a_sliding_window_that_no_block_uses_is_accepted(tmp_path: Path, unused: dict[str, Any]) -> None:
    write_folder(tmp_path, "qwen2")
    configure(tmp_path, use_sliding_window=True, **unused)
    assert started(tmp_path).model.sliding_window is None


def test_weights_in_several_files_are_the_same_start(folder: Path) -> None:
    whole = started(folder).start
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in halves.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    (folder / SINGLE).unlink()
    places = {name: file for file, some in halves.items() for name in some}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    assert started(folder).start == whole
    save_file({names[0]: tensors[names[0]], **{name: tensors[name] for name in names[1::2]}}, folder / "b.safetensors")
    with pytest.raises(ConfigError, match="is in two files"):
        started(folder)


def test_another_folder_is_not_the_runs(folder: Path) -> None:
    manifest = started(folder)
    assert run_id_of(manifest) != run_id_of(manifest.model_copy(update={"start": None}))
    write_folder(folder, seed=1)
    cut = open_start(manifest, folder)
    with pytest.raises(ConfigError, match="is not this run's model: module 1"):
        cut.anchor(ModuleId(1))
    with pytest.raises(ConfigError, match="does not start from an existing model"):
        open_start(default_manifest(0), folder)
    assert open_start(manifest, None) is None


def test_experts_start_alike(folder: Path) -> None:
    table = default_manifest(0).model_dump()
    table["stages"]["experts"] = 2
    manifest = starting_from(folder, manifest_from_table(table), is_default=True, keeps_blocks=False)
    cut = CutModel(manifest, ModelFolder(folder))
    assert cut.anchor(ModuleId(1, 0)).version == cut.anchor(ModuleId(1, 1)).version


def test_a_digest_for_each_stage_is_asked_for(folder: Path) -> None:
    table = started(folder).model_dump()
    with pytest.raises(ManifestError, match="one digest for each of the 5 stages"):
        manifest_from_table(table | {"start": {"modules": table["start"]["modules"][:-1]}})


@pytest.mark.parametrize(("blocks", "stages", "wanted"), [(4, 3, (0, 2, 2)), (5, 3, (0, 2, 3)), (2, 5, (0, 1, 1))])
def test_blocks_are_spread_evenly(blocks: int, stages: int, wanted: tuple[int, ...]) -> None:
    assert spread(blocks, stages) == wanted
