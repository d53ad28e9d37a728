"""A run with experts: each path is a model of its own, and one folder has them all."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from node.data.local_paths import LocalPathOptions
from node.data.tokenizers import ByteTokenizer
from node.export.open_model import evaluate_model, open_model
from node.export.source import RoutedModel, parse_path, path_modules, routed_model
from node.model.decoder import Continuation, Sampling
from node.network.loss_report import AskedPaths
from node.solo.trainer import WholeModel
from swarm.experts.routes import module_at
from swarm.vocabulary.errors import ConfigError, CorruptSnapshot
from swarm.vocabulary.types import Route
from tests.node.checkpoint.saved_states import CPU, decoder_of, exported, noisy_model, save_checkpoint
from tests.node.experts.test_router import manifest_with, some_router

TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(1))

ROUTER = some_router((1, 2, 2))

PATHS: Sequence[Route] = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.fixture
def model() -> WholeModel:
    return noisy_model(manifest_with(ROUTER))


@pytest.fixture
def expert_checkpoint(tmp_path: Path, model: WholeModel) -> Path:
    folder = save_checkpoint(tmp_path / "checkpoint", manifest_with(ROUTER), model)
    (folder / "manifest.router").write_bytes(ROUTER.to_bytes())
    return folder


@torch.no_grad()
def logits_on(model: WholeModel, route: Route) -> torch.Tensor:
    hidden = model.embedding(TOKENS)
    parts = dict(model.modules())
    for stage in range(1, len(route) + 1):
        (stack,) = parts[module_at(route, stage)]
        hidden = stack(hidden)
    return model.head.logits(hidden)


def test_each_path_is_a_llama_with_its_own_logits(tmp_path: Path, expert_checkpoint: Path, model: WholeModel) -> None:
    import transformers

    for route in PATHS:
        folder = tmp_path / f"path{route[0]}{route[1]}"
        exported(expert_checkpoint, folder, route=route)
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report
        with torch.no_grad():
            found = theirs(TOKENS).logits
        assert (found - logits_on(model, route)).abs().max().item() <= 1e-4
        assert torch.equal(decoder_of(folder).logits(TOKENS), logits_on(model, route)), "and is read back here"
    with pytest.raises(ConfigError, match=r"path 1\.1,2\.1 does not exist: this model has no module 1\.1"):
        decoder_of(tmp_path / "path01", (1, 1))


def test_one_folder_has_every_module_and_the_router(tmp_path: Path, expert_checkpoint: Path, model: WholeModel) -> None:
    exported(expert_checkpoint, folder := tmp_path / "every", every=True)
    assert not (folder / "config.json").exists(), "no Llama model has these"
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [
        f"module-{module}.safetensors" for module in ("0.0", "1.0", "1.1", "2.0", "2.1")
    ]
    for route in PATHS:
        assert torch.equal(decoder_of(folder, route).logits(TOKENS), logits_on(model, route))
    exported(folder, again := tmp_path / "again", route=(1, 0))
    assert torch.equal(decoder_of(again).logits(TOKENS), logits_on(model, (1, 0)))
    with pytest.raises(ConfigError, match=r"stages\.experts"):
        exported(folder, tmp_path / "which")
    origin = json.loads((folder / "skipstone.json").read_text())
    origin["modules"]["1.0"] = origin["modules"]["1.1"]
    (folder / "skipstone.json").write_text(json.dumps(origin))
    with pytest.raises(CorruptSnapshot, match=r"module 1\.0 differs from the exported one"):
        decoder_of(folder, (0, 0))


def test_held_out_loss_is_of_each_texts_own_path(tmp_path: Path) -> None:
    (text := tmp_path / "text").mkdir()
    for number in range(60):
        (text / f"{number}").write_text(f"{number}-{number * number} " * 20)
    manifest = manifest_with(ROUTER, data__source=f"path:{text}", data__held_out=0.9)
    checkpoint, told = save_checkpoint(tmp_path / "checkpoint", manifest), LocalPathOptions(text=text)
    (checkpoint / "manifest.router").write_bytes(ROUTER.to_bytes())
    whole = asyncio.run(evaluate_model(str(checkpoint), 12, local_path_options=told))
    assert sum(route["microbatches"] for route in whole["routes"].values()) == 12
    exported(checkpoint, every := tmp_path / "every", every=True)
    assert asyncio.run(evaluate_model(str(every), 12, local_path_options=told)) == whole
    assert len(whole["routes"]) > 1
    named = next(iter(whole["routes"]))
    exported(checkpoint, tmp_path / "one", route=parse_path(named, 3))
    one = asyncio.run(evaluate_model(str(tmp_path / "one"), 12, local_path_options=told))
    assert one["routes"][named] == whole["routes"][named]
    assert one["loss"] != whole["loss"], "all text was read on one path"


def test_a_path_is_named_by_a_module_of_each_stage() -> None:
    assert parse_path("1.0,2.1", 3) == (0, 1)
    for text in ("", "1.0", "2.1,1.0", "1.0,2", "1.0,2.1,3.0", "a,b"):
        with pytest.raises(ConfigError, match="is not a path through stages 1 to 2"):
            parse_path(text, 3)


class TestGeneration:
    """Only the modules of the text's path are read, and when it is chosen anew the text is."""

    async def model(self, expert_checkpoint: Path) -> RoutedModel:
        async with open_model(str(expert_checkpoint)) as opened:
            with pytest.raises(ConfigError, match=r"stages\.experts"):
                path_modules(opened.source, None)
            return await routed_model(opened.source, CPU)

    async def test_the_modules_of_one_route_are_read(self, expert_checkpoint: Path) -> None:
        model = await self.model(expert_checkpoint)
        route = model.route_of(list(b"The quick brown fox"))
        assert route in PATHS
        await model.decoder(route)
        assert tuple(model.read) == tuple(module_at(route, stage) for stage in range(3))
        assert model.route_of([]) in PATHS, "an empty prompt has a route, too"
        assert {model.route_of(list(f"{n}-{n * n}".encode())) for n in range(200)} == set(PATHS)
        async with open_model(str(expert_checkpoint)) as opened:
            assert opened.narrow(AskedPaths(1)) == ((1,),)
            part = await routed_model(opened.source, CPU)
        assert (await part.decoder(part.route_of([]))).stages == (1,)

    async def test_another_path_reads_the_text_anew(self, expert_checkpoint: Path) -> None:
        model, greedy = await self.model(expert_checkpoint), Sampling(temperature=0)
        prompt, bytes_ = list(b"A path"), ByteTokenizer()
        first, second = await model.decoder((0, 0)), await model.decoder((1, 1))
        text = Continuation(first, bytes_, prompt, 8, greedy)
        begun = list(text.take(4))
        text.go_on_with(second)
        rest = list(text.take(8))
        assert begun == list(Continuation(first, bytes_, prompt, 4, greedy).take(4))
        assert rest == list(Continuation(second, bytes_, prompt + begun, 4, greedy).take(4))
        assert text.has_ended
        assert text.tokens == prompt + begun + rest
