"""Exports."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.kit import loss_of
from node.checkpoint.folder import MAX_HEADER_BYTES
from node.data.feed import held_out_microbatches
from node.data.local_paths import LocalPathOptions
from node.export import source as source_module
from node.export.hugging_face import SHARD_BYTES, plan_shards
from node.export.open_model import evaluate_model
from node.export.source import RoutedModel
from node.export.swarm_source import state_to_take
from node.export.writer import export
from node.model.decoder import Decoder
from node.model.initialization import parameters_of
from node.model.shapes import parameter_shapes
from node.network.loss_report import AskedPaths
from node.solo.trainer import WholeModel
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary import errors
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned
from tests.node.checkpoint.saved_states import (
    CPU,
    decoder_of,
    exported,
    file_of,
    flip,
    logits_of,
    noisy_model,
    save_checkpoint,
    version,
)
from tests.node.small_manifest import small_manifest

TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(1))
A_FEW_TENSORS = 20_000


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "checkpoint", small_manifest())


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    exported(checkpoint, tmp_path / "folder", shard_bytes=A_FEW_TENSORS)
    return tmp_path / "folder"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("blocks", [(1, 2, 1), (0, 1), (2,)])
def test_shapes_are_those_of_the_parts(blocks: tuple[int, ...]) -> None:
    manifest = small_manifest(stages__blocks=list(blocks))
    for module, parts in WholeModel(manifest, CPU).modules():
        shapes = {name: tuple(value.shape) for name, value in parameters_of(*parts).items()}
        assert parameter_shapes(manifest, module) == shapes


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, A_FEW_TENSORS, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_gives_the_logits_of_the_parts(tmp_path: Path, shard_bytes: int, dtype: str) -> None:
    manifest = small_manifest(model__dtype=dtype)
    model = noisy_model(manifest)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", manifest, model)
    done = exported(checkpoint, tmp_path / "folder", shard_bytes=shard_bytes)
    files = list((tmp_path / "folder").glob("*.safetensors"))
    assert done.files == len(files) == len(plan_shards(manifest, manifest.modules(), shard_bytes))
    assert shard_bytes != A_FEW_TENSORS or 1 < len(files) < 20
    assert done.size_bytes == sum(4 * value.numel() for file in files for value in load_file(file).values())
    for folder in (checkpoint, tmp_path / "folder"):
        assert torch.equal(decoder_of(folder).logits(TOKENS), logits_of(model, TOKENS))


def test_an_export_of_an_export_is_the_same(tmp_path: Path, folder: Path) -> None:
    exported(folder, tmp_path / "again", shard_bytes=A_FEW_TENSORS)
    assert contents(tmp_path / "again") == contents(folder)
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "whoever may read one file may read all"


def test_the_folder_says_where_it_comes_from(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "checkpoint", small_manifest(stages__per_path=1))
    (tmp_path / "folder").mkdir()  # an empty folder is taken
    done = exported(checkpoint, tmp_path / "folder")
    origin = json.loads((tmp_path / "folder" / "skipstone.json").read_text())
    assert origin["run"] == done.run
    assert origin["stages"] == {"blocks": [1, 2, 1], "visited_per_path": 1, "trained_with_skipping": True}
    assert (tmp_path / "folder" / "manifest.toml").read_bytes() == (checkpoint / "manifest.toml").read_bytes()


def test_only_one_s_own_folder_opens_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest names anybody's text and tokenizer, unless it is signed with this machine's key."""
    monkeypatch.setenv("SKIPSTONE_HOME", str(tmp_path))
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 3000)
    tokenizer = {"data__tokenizer": f"file:{text}", "data__tokenizer_sha256": "0" * 64}
    manifest = small_manifest(data__source=f"path:{text}", **tokenizer)
    checkpoint = save_checkpoint(tmp_path / "downloaded", manifest)
    with pytest.raises(errors.ConfigError, match="--text"):
        asyncio.run(evaluate_model(str(checkpoint), 3))
    with pytest.raises(errors.ConfigError, match="--tokenizer"):
        exported(checkpoint, tmp_path / "folder")
    own = Identity.create(tmp_path / "identity.key")
    (checkpoint / "manifest.toml").write_bytes(sign_manifest(manifest, own).text)
    with pytest.raises(errors.ConfigError, match="has SHA-256"):  # it was opened, and is another one
        exported(checkpoint, tmp_path / "folder")


def test_parts_of_a_model_are_measured_on_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 3000)
    manifest = small_manifest(data__source=f"path:{tmp_path / 'text'}")
    model = noisy_model(manifest)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", manifest, model)
    told = LocalPathOptions(text=tmp_path / "text")
    every = AskedPaths(1, every_subset=True)
    measured = asyncio.run(evaluate_model(str(checkpoint), 3, paths=every, local_path_options=told))
    texts = list(held_out_microbatches(manifest, 3))
    expected = [sum(loss_of(model, text, (stage,)) for text in texts) / 3 for stage in (1, 2)]
    assert [subset["stages"] for subset in measured["subsets"]] == [[1], [2]]
    assert [subset["loss"] for subset in measured["subsets"]] == pytest.approx(expected, abs=1e-5)
    assert measured["loss"] == pytest.approx(sum(expected) / 2, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)
    first = asyncio.run(evaluate_model(str(checkpoint), 3, paths=AskedPaths(1), local_path_options=told))
    assert first["subsets"] == measured["subsets"][:1]


NARROW = {"model__residual": 5, "model__attention_bias": True}


@pytest.mark.parametrize("changes", [{}, NARROW, NARROW | {"model__token_rank": 3}], ids=["full", "narrow", "rows"])
def test_an_export_of_some_stages_is_a_llama_of_their_blocks(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Also of a narrow residual stream, which is folded into embedding, output matrices and their biases.

    Rows of tokens need code of the export's own, which a person must trust.
    """
    import transformers

    manifest = small_manifest(stages__blocks=[1, 2, 1, 1], **changes)
    model = noisy_model(manifest)
    checkpoint = save_checkpoint(tmp_path / "checkpoint", manifest, model)
    exported(checkpoint, folder := tmp_path / "part", paths=AskedPaths(2), shard_bytes=A_FEW_TENSORS)
    origin = json.loads((folder / "skipstone.json").read_text())
    assert (origin["only_stages"], list(origin["modules"])) == ([0, 1, 3], ["0.0", "1.0", "3.0"])
    how = {"output_loading_info": True, "trust_remote_code": "model__token_rank" in changes}
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    assert not any(report.values()), report
    assert theirs.config.num_hidden_layers == 4
    model.stacks = [stack for stage, stack in enumerate(model.stacks, start=1) if stage != 2]
    with torch.no_grad():
        assert (theirs(TOKENS).logits - logits_of(model, TOKENS)).abs().max().item() <= 1e-4
        found, read = logits_of(model, TOKENS), decoder_of(folder).logits(TOKENS)
    assert torch.equal(read, found) or changes, "and is read back here"
    assert (read - found).abs().max() <= 1e-4
    parts = {name: value for _, each in model.modules() for name, value in parameters_of(*each).items()}
    assert (Decoder(manifest, parts, CPU).through([1, 3]).logits(TOKENS) - found).abs().max() <= 1e-4
    exported(folder, tmp_path / "again", shard_bytes=A_FEW_TENSORS)
    assert contents(tmp_path / "again") == contents(folder)
    for only in ([0, 1, 2, 3], [1, 3], None, "013"):
        (folder / "skipstone.json").write_text(json.dumps(origin | {"only_stages": only}))
        with pytest.raises(errors.StateError, match="lacks a stage"):
            decoder_of(folder)


def test_a_gap_is_an_error_or_is_gone_around(caplog: pytest.LogCaptureFixture) -> None:
    manifest = small_manifest(stages__blocks=[0, 1, 1, 1, 1], stages__per_path=3)
    with pytest.raises(errors.Unreachable, match=r"missing: stage 3 \(no peer\)") as caught:
        AskedPaths().of(manifest, {1, 2, 4}, {3: "no peer"})
    assert "--stages-per-path 3" in caught.value.hint
    with pytest.raises(errors.Unreachable) as caught:
        AskedPaths().of(small_manifest(), {1}, {2: "no peer"})
    assert "--stages-per-path" not in caught.value.hint, "its paths visit all stages"
    with pytest.raises(errors.Unreachable, match="stage 0"):
        AskedPaths(2).of(manifest, {1, 2, 3, 4}, {0: "no peer"})
    assert AskedPaths(2).of(manifest, {1, 2, 4}, {3: "no peer"}) == ((1, 4),)
    assert caplog.messages == ["missing: stage 3 (no peer); uses stages 0, 1, 4"]


class TestTarget:
    def test_an_export_gives_way_only_when_asked_for(self, tmp_path: Path, folder: Path) -> None:
        other = save_checkpoint(tmp_path / "other", small_manifest(seed=9))
        before = contents(folder)
        with pytest.raises(errors.ConfigError, match="already has an export"):
            exported(other, folder)
        exported(folder, folder, replace=True, shard_bytes=A_FEW_TENSORS)
        assert contents(folder) == before, "it may replace itself"
        exported(other, folder, replace=True)
        assert contents(folder)["manifest.toml"] == (other / "manifest.toml").read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "folder", "other"]

    def test_nothing_else_ever_gives_way(self, tmp_path: Path, checkpoint: Path) -> None:
        (tmp_path / "file").write_text("precious")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        for name, message in (("checkpoint", "not empty"), ("file", "not a folder"), ("link", "not a folder")):
            with pytest.raises(errors.ConfigError, match=message):
                exported(checkpoint, tmp_path / name, replace=True)
        assert (tmp_path / "file").read_text() == "precious"

    @pytest.mark.parametrize("replace", [False, True])
    def test_a_full_disk_leaves_what_was_there(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
    ) -> None:
        before = contents(folder)
        target = folder if replace else tmp_path / "new"

        def disk_full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", disk_full)
        with pytest.raises(errors.StateError, match="No space left") as caught:
            exported(tmp_path / "checkpoint", target, replace=replace)
        assert "free space" in caught.value.hint
        assert contents(folder) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "folder"]

    def test_a_damaged_source_leaves_nothing(self, tmp_path: Path, checkpoint: Path) -> None:
        flip(file_of(checkpoint, "2.0"))
        with pytest.raises(errors.CorruptSnapshot, match=r"module 2\.0"):
            exported(checkpoint, tmp_path / "folder")
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


class TestCheckpointSource:
    def test_a_changed_manifest_is_said(self, checkpoint: Path) -> None:
        manifest = checkpoint / "manifest.toml"
        manifest.write_text(manifest.read_text().replace("seed = 3", "seed = 4"))
        with pytest.raises(errors.ManifestError, match="changed after signing"):
            decoder_of(checkpoint)

    def test_a_manifest_of_a_huge_model_costs_no_memory(self, checkpoint: Path) -> None:
        huge = small_manifest(model__hidden=65_536, model__heads=512, model__kv_heads=512, model__vocabulary=1_000_000)
        (checkpoint / "manifest.toml").write_bytes(sign_manifest(huge, Identity.generate()).text)
        with pytest.raises(errors.StateError):
            decoder_of(checkpoint)

    def test_a_folder_with_nothing_of_ours(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ConfigError, match="not a checkpoint"):
            decoder_of(tmp_path)
        with pytest.raises(errors.ConfigError, match="not a join link, a checkpoint or"):
            decoder_of(tmp_path / "none")


class TestExportedSource:
    @pytest.mark.parametrize(
        ("key", "value"),
        [("hidden_size", 2**40), ("num_hidden_layers", 10**9), ("rope_theta", 5.0), ("vocab_size", -1)],
    )
    def test_a_config_that_is_not_the_manifests_is_refused(self, folder: Path, key: str, value: float) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(errors.StateError, match=f"config.json: {key} is {value}") as caught:
            decoder_of(folder)
        assert "Export the model again" in caught.value.hint

    def test_every_file_of_parameters_is_guarded(self, folder: Path) -> None:
        for file in sorted(folder.glob("*.safetensors")):
            whole = file.read_bytes()
            flip(file)
            with pytest.raises(errors.CorruptSnapshot, match=file.name):
                decoder_of(folder)
            file.write_bytes(whole[:-1])
            with pytest.raises(errors.CorruptSnapshot, match=file.name):
                decoder_of(folder)
            file.unlink()
            with pytest.raises(errors.StateError, match=file.name):
                decoder_of(folder)
            file.write_bytes(whole)

    def test_a_parameter_that_is_missing_or_of_another_shape_is_named(self, folder: Path) -> None:
        file = min(folder.glob("*.safetensors"))
        tensors = load_file(file)
        name = min(tensors)
        save_file({**tensors, name: tensors[name].to(torch.float16)}, file)
        with pytest.raises(errors.StateError, match=f"{name} is F16"):
            decoder_of(folder)
        del tensors[name]
        save_file(tensors or {"other": torch.zeros(1)}, file)
        with pytest.raises(errors.StateError, match=f"no file has parameter {name}"):
            decoder_of(folder)

    @pytest.mark.parametrize("name", ["config.json", "manifest.toml"])
    def test_a_missing_file_is_named(self, folder: Path, name: str) -> None:
        (folder / name).unlink()
        with pytest.raises(errors.ConfigError, match=f"cannot read .*{name}"):
            decoder_of(folder)

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("", errors.CorruptSnapshot),
            ("[]", errors.CorruptSnapshot),
            ("[" * 100_000, errors.CorruptSnapshot),
            ('{"format": 2, "run": "x"}', errors.StateError),
            ('{"format": 1, "run": "x"}', errors.ManifestError),
        ],
    )
    def test_an_origin_that_is_none(self, folder: Path, text: str, error: type[errors.SkipstoneError]) -> None:
        (folder / "skipstone.json").write_text(text)
        with pytest.raises(error):
            decoder_of(folder)

    @pytest.mark.parametrize("change", [{"shards": 10**9}, {"shards": "../.."}, {"modules": None}, {"modules": {}}])
    def test_a_changed_origin(self, folder: Path, change: dict[str, Any]) -> None:
        origin = json.loads((folder / "skipstone.json").read_text())
        (folder / "skipstone.json").write_text(json.dumps(origin | change))
        with pytest.raises(errors.StateError):
            decoder_of(folder)

    def test_a_header_of_many_megabytes_is_not_parsed(self, folder: Path) -> None:
        with next(folder.glob("*.safetensors")).open("r+b") as opened:
            opened.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        with pytest.raises(errors.CorruptSnapshot, match="header"):
            decoder_of(folder)


class OneSource:
    def __init__(self, manifest: Manifest, modules: dict[ModuleId, dict[str, torch.Tensor]]) -> None:
        self.signed = sign_manifest(manifest, Identity.generate())
        self.modules, self.given = manifest.modules(), modules

    async def module(self, module: ModuleId) -> dict[str, torch.Tensor]:
        return self.given[module]

    async def router(self) -> None:
        return None


class TestAnySource:
    def modules(self) -> dict[ModuleId, dict[str, torch.Tensor]]:
        return {module: parameters_of(*parts) for module, parts in WholeModel(small_manifest(), CPU).modules()}

    def read(self, modules: dict[ModuleId, dict[str, torch.Tensor]], manifest: Manifest | None = None) -> Decoder:
        return asyncio.run(RoutedModel(OneSource(manifest or small_manifest(), modules), CPU, None).decoder(None))

    def test_what_it_gives_is_checked(self, tmp_path: Path) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        wrong = {
            "is missing": {},
            "is torch.float16": {name: torch.zeros(24, 16, dtype=torch.float16)},
            "is torch.float32": {name: torch.zeros(16, 24)},
            "not finite": {name: torch.full((24, 16), float("nan"))},
            "is not one of its parameters": {name: torch.zeros(24, 16), "zzz": torch.zeros(1)},
        }
        for message, replacement in wrong.items():
            modules = self.modules()
            del modules[ModuleId(1)][name]
            modules[ModuleId(1)] |= replacement
            with pytest.raises(errors.StateError, match=message):
                self.read(modules)
            with pytest.raises(errors.StateError, match=message):
                asyncio.run(export(OneSource(small_manifest(), modules), tmp_path / "folder"))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("change", [{"model__sequence": 1_048_576}, {"model__vocabulary": 1_000_000}])
    def test_a_model_larger_than_memory_is_refused_before_it_is_read(
        self, change: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(source_module, "available_memory", lambda: Reasoned(16 * 2**20, "on this machine"))
        rows = {"training__rows": 1, "training__inner_tokens": change.get("model__sequence", 16)}
        with pytest.raises(errors.ResourceExhausted, match=r"of memory; 16\.0 MiB are free on this machine"):
            self.read({}, small_manifest(**change, **rows))


MODULE = ModuleId(2)
A, B, C = (PeerId(name) for name in "abc")


def test_the_newest_state_that_replicas_agree_on_is_taken() -> None:
    announced = {A: version(7), B: version(8), C: version(8)}
    assert state_to_take(MODULE, announced, 50) == (version(8), (B, C))
    assert state_to_take(MODULE, {A: version(7), B: version(8)}, 50) == (version(8), (B,))
    with pytest.raises(errors.NoQuorum, match=r"module 2\.0: 3 replicas have 3 states"):
        state_to_take(MODULE, announced | {C: version(8, 2)}, 50)
    with pytest.raises(errors.Unreachable, match=r"no peer serves module 2\.0"):
        state_to_take(MODULE, {}, 50)


def test_initial_weights_are_not_handed_out_as_a_model() -> None:
    with pytest.raises(errors.NoQuorum, match="not completed a round") as caught:
        state_to_take(MODULE, {A: version(0), B: version(0)}, 50)
    assert "after 50 inner steps" in caught.value.hint
    assert state_to_take(MODULE, {A: version(0), B: version(0)}, 50, is_model=True) == (version(0), (A, B))
