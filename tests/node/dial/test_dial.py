"""The dial over its whole range: what was asked for is met, every stage fits, every choice has a reason."""

from __future__ import annotations

import re

import pytest

from node.dial.dial import FILLED, LARGEST, SMALLEST, Peers, Wish, choose_recipe, choose_shape, forecast, spread, turn
from node.model.memory_need import need_of
from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import ModuleId, Reasoned

MILLION, BILLION, GB = 10**6, 10**9, 10**9
SIZES = [10 * MILLION, 25 * MILLION, 60 * MILLION, 160 * MILLION, 400 * MILLION, BILLION, 3 * BILLION, 7 * BILLION]
LLAMA_2, SMOL, LLAMA_3 = 32_000, 49_152, 128_256


def parameters_of(manifest: Manifest) -> int:
    shapes = (parameter_shapes(manifest, module) for module in manifest.modules())
    return sum(parameter_bytes(each) for each in shapes) // BYTES_PER_PARAMETER


def tokens(number: int) -> Reasoned[int]:
    return Reasoned(number, "those of a file")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocabulary", [257, LLAMA_2, SMOL])
def test_the_size_is_met_and_the_manifest_says_what_was_told(size: int, vocabulary: int) -> None:
    if vocabulary > 257 and size < 25 * MILLION:
        pytest.skip("the embedding alone would be most of it")
    turned = turn(Wish(parameters=size, tokens=tokens(vocabulary), peers=Peers(card=48 * GB)), "run")
    manifest, told = turned.manifest, {name: choice.value for name, choice in turned.choices}
    assert parameters_of(manifest) == pytest.approx(size, rel=0.1)
    assert told["parameters"] == parameters_of(manifest)
    assert told["vocabulary"] == manifest.model.vocabulary >= vocabulary
    assert told["depth"] == sum(manifest.stages.blocks)
    assert (told["step"], told["inner steps"]) == (manifest.training.inner_tokens, manifest.training.inner_steps)
    assert 30 <= manifest.model.hidden / sum(manifest.stages.blocks) <= 130
    assert all(choice.reason for _, choice in turned.choices)
    assert manifest.model.dtype == "bfloat16"


@pytest.mark.parametrize("size", [SMALLEST, 2 * MILLION, LARGEST])
def test_the_ends_of_the_range_are_met_as_well(size: int) -> None:
    assert choose_shape(size, 320).parameters == pytest.approx(size, rel=0.1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("card", [6 * GB, 8 * GB, 12 * GB, 24 * GB])
def test_every_stage_fits_the_card_and_one_block_more_would_not(size: int, card: int) -> None:
    manifest = turn(Wish(parameters=size, peers=Peers(card=card)), "run").manifest
    blocks = manifest.stages.blocks
    needs = [need_of(manifest, (ModuleId(stage),), DEFAULT_SLOTS).device for stage in range(manifest.stages.count)]
    assert max(needs) <= FILLED * card
    if len(blocks) > 2:
        fewer = spread(sum(blocks), len(blocks) - 1)
        table = manifest.model_dump()
        table["stages"]["blocks"] = fewer
        cut = Manifest.model_validate(table)
        most = max(need_of(cut, (ModuleId(stage),), DEFAULT_SLOTS).device for stage in range(cut.stages.count))
        assert most > FILLED * card, "fewer stages would have done"


def test_an_optimizer_that_keeps_more_takes_more_stages() -> None:
    counts = {
        inner: turn(Wish(parameters=BILLION, peers=Peers(card=12 * GB), inner=inner), "run").manifest.stages.count
        for inner in ("muon", "adamw", "soap")
    }
    assert counts["muon"] <= counts["adamw"] < counts["soap"]


@pytest.mark.parametrize(("peers", "stages"), [(2, 2), (5, 5), (7, 7), (40, 7)])
def test_each_peer_gets_a_stage_as_long_as_there_are_blocks(peers: int, stages: int) -> None:
    turned = turn(Wish(parameters=10 * MILLION, peers=Peers(number=peers)), "run")
    assert turned.manifest.stages.count == stages
    assert sum(turned.manifest.stages.blocks) == 6


def test_peers_beyond_the_stages_share_the_tokens_of_a_step() -> None:
    alone, shared = (
        turn(Wish(parameters=400 * MILLION, peers=Peers(card=24 * GB, number=number)), "run").manifest.training
        for number in (2, 8)
    )
    assert shared.inner_tokens == pytest.approx(alone.inner_tokens / 4, rel=0.05)
    assert shared.schedule == alone.schedule.model_copy(update={"warmup_tokens": shared.schedule.warmup_tokens})
    assert shared.schedule.warmup_tokens == pytest.approx(alone.schedule.warmup_tokens or 0, rel=0.05)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Wish(parameters=SMALLEST - 1), "is outside"),
        (Wish(parameters=LARGEST + 1), "is outside"),
        (Wish(parameters=10 * MILLION, tokens=tokens(LLAMA_3)), "cannot hold a vocabulary of 128,256"),
        (Wish(parameters=7 * BILLION, peers=Peers(card=GB)), "one block of this model needs more than 75%"),
        (Wish(parameters=7 * BILLION, peers=Peers(card=12 * GB), tokens=tokens(LLAMA_3)), "stage 0, with a vocabulary"),
        (Wish(parameters=7 * BILLION, peers=Peers(card=12 * GB, number=4)), "needs 19 peers, not 4"),
        (Wish(parameters=10 * MILLION, peers=Peers(number=1)), "at least two peers"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_help(wish: Wish, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        turn(wish, "run")
    assert re.search(r"--|Write it as", refused.value.hint)


def test_step_and_rate_are_those_of_the_fits() -> None:
    recipe = choose_recipe(7 * BILLION, 10**8, 4096, 10, 1, 2 * 10**12)
    assert recipe["step"].value == pytest.approx(2304 * 4096, rel=0.15)
    assert recipe["rate"].value == pytest.approx(4.2e-4, rel=0.15)
    assert recipe["tokens"] == Reasoned(2 * 10**12, "set by --total-tokens")


@pytest.mark.parametrize("size", SIZES)
def test_a_step_fills_the_pipeline_and_the_warm_up_ends(size: int) -> None:
    for total in (None, 10 * MILLION):
        manifest = turn(Wish(parameters=size, total_tokens=total), "run").manifest
        assert manifest.microbatches_per_step >= 2 * manifest.stages.count
        warm, end = manifest.training.schedule_tokens
        assert warm <= end / 2
        assert end == (20 * parameters_of(manifest) if total is None else total)


def test_the_forecast_adds_up() -> None:
    manifest = turn(Wish(parameters=BILLION, peers=Peers(card=12 * GB)), "run").manifest
    seen = forecast(manifest, 12 * GB)
    assert seen.token_bytes == pytest.approx(2 * manifest.model.hidden * (1 + 4 / 128))
    assert seen.tokens_per_s[20] == pytest.approx(20e6 / 8 / seen.token_bytes)
    assert seen.tokens_per_s[20] <= seen.tokens_per_s[100] <= seen.tokens_per_s[1000] <= seen.computed_per_s
    assert seen.seconds(20) == pytest.approx(20 * parameters_of(manifest) / seen.tokens_per_s[20])
    assert seen.stage.device > seen.data_node.device
    faster = forecast(manifest, 24 * GB)
    assert faster.computed_per_s > seen.computed_per_s
    largest = max(parameter_bytes(parameter_shapes(manifest, module)) for module in manifest.modules()[1:])
    assert seen.round_bytes == pytest.approx(2 * largest / 8, rel=0.07), "INT4 is an eighth of float32, and scales"
