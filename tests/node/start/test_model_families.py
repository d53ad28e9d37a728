"""A folder of each family, cut into modules and put together again: the logits are those of `transformers`."""

from pathlib import Path

import pytest
import torch

from node.averaging.anchor.anchor import tensors_of
from node.cli.manifests import starting_from
from node.data.local_paths import LocalPathOptions
from node.data.packing import Microbatch
from node.local_swarm.default_manifest import default_manifest
from node.model.initialization import parameters_of
from node.model.optimizer import Accumulator, Addition, InnerOptimizer
from node.solo.trainer import SOLO, WholeModel
from node.start.cut_model import CutModel, ModelFolder
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.types import MicrobatchId, ModuleId
from tests.node.checkpoint.saved_states import CPU, decoder_of, exported, logits_of, save_checkpoint
from tests.node.start.tiny_models import MODELS, write_model

TOKENS = torch.randint(257, (3, 48), generator=torch.Generator().manual_seed(4))


def causal(folder: Path) -> Manifest:
    base = manifest_from_table(default_manifest(0).model_dump() | {"codecs": {}})
    table = starting_from(folder, base, is_default=True, keeps_blocks=False).model_dump()
    table["model"]["attention"] = "causal"
    return manifest_from_table(table)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max().item())


@pytest.mark.parametrize("which", MODELS)
@torch.no_grad()
def test_a_folder_comes_back_from_the_run_that_starts_from_it(tmp_path: Path, which: str) -> None:
    theirs = write_model(tmp_path / "model", which)
    wanted = theirs(TOKENS).logits
    manifest = causal(tmp_path / "model")
    assert manifest.model.family == theirs.config.model_type
    assert manifest.stages.blocks == (0, 1, 1, 1, 1)

    ours = WholeModel(manifest, CPU)
    ours.begin(CutModel(manifest, ModelFolder(tmp_path / "model")))
    assert difference(logits_of(ours, TOKENS), wanted) <= 1e-4

    checkpoint = save_checkpoint(tmp_path / "checkpoint", manifest, ours)

    exported(checkpoint, tmp_path / "folder", told=LocalPathOptions(tokenizer=tmp_path / "model" / "tokenizer.json"))
    assert difference(decoder_of(tmp_path / "folder").logits(TOKENS), wanted) <= 1e-4
    back, report = type(theirs).from_pretrained(tmp_path / "folder", output_loading_info=True)
    assert not any(report.values()), report
    assert difference(back(TOKENS).logits, wanted) <= 1e-6
    saved, first = back.config.to_dict(), theirs.config.to_dict()
    for key in ("model_type", "rope_parameters", "sliding_window", "max_position_embeddings", "tie_word_embeddings"):
        assert saved.get(key) == first.get(key), key


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_two_bytes_are_read_exactly(tmp_path: Path, kind: torch.dtype) -> None:
    model = write_model(tmp_path / "model", "qwen3")
    model.to(kind).save_pretrained(tmp_path / "model")
    manifest = causal(tmp_path / "model")
    cut = CutModel(manifest, ModelFolder(tmp_path / "model"))
    found: dict[str, torch.Tensor] = {}
    for module in manifest.modules():
        anchor = cut.anchor(module)
        found |= tensors_of(anchor.layout, anchor.parameters)
    for name, parameter in model.named_parameters():
        assert torch.equal(found.pop(name), parameter.float()), name
    assert not found


def test_what_is_served_chunk_by_chunk_is_the_anchor(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen2", hidden_size=56, intermediate_size=75, vocab_size=331)
    manifest = causal(tmp_path / "model")
    cut = CutModel(manifest, ModelFolder(tmp_path / "model"))
    for module in manifest.modules():
        anchor, served = cut.anchor(module), cut.first_anchor(module.stage)
        assert (served.version, served.hashes) == (anchor.version, anchor.hashes)
        assert len(anchor.hashes) == 2 * anchor.layout.chunks
        for number in range(len(anchor.hashes)):
            assert served.chunk(number) == anchor.chunk(number)
        assert cut.has(module, anchor.version.digest)
        assert not cut.has(module, bytes(32))
        with pytest.raises(IndexError):
            served.chunk(len(anchor.hashes))


def test_tied_embeddings_learn_from_both_ends(tmp_path: Path) -> None:
    """The gradient of the one matrix is that of `transformers`, which has both parts of it, and counts once."""
    theirs = write_model(tmp_path / "model", "llama, grouped and tied")
    table = causal(tmp_path / "model").model_dump()
    table["training"]["inner"]["learning_rate"] = 1.0  # far above the weights' rounding
    manifest = manifest_from_table(table)
    ours = WholeModel(manifest, CPU)
    ours.begin(CutModel(manifest, ModelFolder(tmp_path / "model")))
    labels = TOKENS.roll(-1, 1)
    torch.nn.functional.cross_entropy(theirs(TOKENS).logits.flatten(0, 1), labels.flatten()).backward()
    text = Microbatch(TOKENS, labels, TOKENS.numel())
    _, gradients = ours.gradients(text)
    (_, parts), *_ = ours.modules()
    sums = [Accumulator(part) for part in parts]
    for part, total in zip(parts, sums, strict=True):
        assert total.add(MicrobatchId(SOLO, 0), text.size, gradients[part]) is Addition.ADDED
    optimizer = InnerOptimizer(manifest, ModuleId(0), sums)
    before = ours.head.lm_head.weight.detach().clone()
    figures = optimizer.step()
    wanted = [theirs.get_input_embeddings().weight.grad, theirs.model.norm.weight.grad]
    assert figures.gradient_norm == pytest.approx(torch.nn.utils.get_total_norm(wanted).item(), rel=1e-4)
    moved = ours.head.lm_head.weight.detach() - before
    assert torch.equal(ours.embedding.get_parameter("model.embed_tokens.weight"), ours.head.lm_head.weight)
    large = wanted[0].abs() > 1e-5  # where Adam's first step is the rate, in the direction of the gradient
    torch.testing.assert_close(moved[large], -figures.learning_rate * wanted[0].sign()[large], rtol=2e-2, atol=0)
    assert sorted(parameters_of(*parts)) == ["model.embed_tokens.weight", "model.norm.weight"]
