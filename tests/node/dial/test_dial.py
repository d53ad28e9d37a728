"""The dial over its whole range: what was asked for is met, every stage fits, every choice has a reason."""

import re
from dataclasses import replace

import pytest

from node.dial.dial import FILLED, LARGEST, SMALLEST, Peers, Wish, choose_shape, forecast, spread, turn
from node.model.memory_need import need_of
from node.model.moments import DEFAULT_SLOTS
from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes
from protocol.manifest.manifest import Manifest
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
    assert (told["depth"], told["optimizer"]) == (sum(manifest.stages.blocks), manifest.training.inner.name)
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
    if len(blocks) > 1:
        fewer = spread(sum(blocks), len(blocks) - 1) if len(blocks) > 2 else (sum(blocks),)
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
    turned = turn(Wish(parameters=10 * MILLION, peers=Peers(number=peers), may_be_whole=False, residual=0), "run")
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
        (Wish(parameters=7 * BILLION, peers=Peers(card=12 * GB, number=4)), "needs 14 peers, not 4"),
        (Wish(parameters=10 * MILLION, peers=Peers(number=1)), "at least two peers"),
        (Wish(parameters=10 * MILLION, blocks=(0, 4)), "--stages both set the size of the model: 6 blocks, and 4"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_help(wish: Wish, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        turn(wish, "run")
    assert re.search(r"--|Write it as", refused.value.hint)


def test_step_and_rate_are_those_of_the_fits() -> None:
    recipe = dict(turn(Wish(parameters=7 * BILLION, total_tokens=2 * 10**12), "run").choices)
    assert recipe["step"].value == pytest.approx(2304 * 4096, rel=0.15)
    assert recipe["rate"].value == pytest.approx(4.2e-4, rel=0.15)
    assert recipe["tokens"] == Reasoned(2 * 10**12, "set by --total-tokens")


@pytest.mark.parametrize("size", [10 * MILLION, 160 * MILLION])
@pytest.mark.parametrize("number", [2, 8])
def test_a_model_that_fits_the_card_is_trained_whole_on_slow_links(size: int, number: int) -> None:
    wish = Wish(parameters=size, peers=Peers(number=number))
    turned = turn(wish, "run")
    whole, told = turned.manifest, dict(turned.choices)
    cut = turn(replace(wish, may_be_whole=False, residual=0), "run").manifest
    assert whole.stages.blocks == (sum(cut.stages.blocks),)
    assert (whole.training.staleness, cut.training.staleness) == (0, 0)
    alone, piped = forecast(whole, 12 * GB), forecast(cut, 12 * GB)
    assert told["whole models"].value == f"{number * alone.tokens_per_s(20):,.0f} tokens/s"
    assert told["pipeline"].value == f"{piped.tokens_per_s(20) * (number // cut.stages.count):,.0f} tokens/s"
    assert told["stages"].reason.startswith("whole models are ")
    assert alone.tokens_per_s(20) == alone.computed_per_s
    assert alone.token_bytes < piped.token_bytes / 8
    steps = alone.total_tokens // (number * whole.training.inner_tokens)
    assert 10 * whole.training.inner_steps <= steps
    # Rounds leave the link mostly free, unless the run has hardly more than ten.
    assert alone.token_bytes * alone.computed_per_s <= 0.05 * 20e6 / 8 or 26 * whole.training.inner_steps > steps
    faster = turn(replace(wish, peers=Peers(number=number, mbit_s=1000)), "run").manifest
    assert faster.stages.count == 1
    assert faster.training.inner_steps < whole.training.inner_steps


def test_peers_with_whole_paths_send_rounds_only() -> None:
    wish = Wish(parameters=160 * MILLION, peers=Peers(number=8), may_be_whole=False, residual=0, workers="paths")
    turned = turn(wish, "run").manifest
    whole = turn(replace(wish, workers="modules", may_be_whole=True), "run").manifest
    assert turned.stages.count > whole.stages.count == 1
    paths, alone = forecast(turned, 12 * GB), forecast(whole, 12 * GB)
    assert turned.training.inner_tokens == whole.training.inner_tokens
    assert paths.token_bytes == pytest.approx(alone.token_bytes, rel=0.01)
    assert paths.computed_per_s == pytest.approx(alone.computed_per_s, rel=0.01)
    with pytest.raises(ConfigError, match=r"whole paths: one needs .* more than 75% of a card of 12 GB"):
        turn(replace(wish, parameters=BILLION), "run")


def test_stages_are_chosen_where_they_are_as_fast_or_wanted_or_the_model_is_too_large() -> None:
    depth = choose_shape(160 * MILLION, 320).blocks
    fast = Wish(parameters=160 * MILLION, peers=Peers(number=depth + 1, mbit_s=100_000))
    near = turn(fast, "run")
    assert near.manifest.stages.blocks == spread(depth, depth + 1)
    assert "about as fast" in dict(near.choices)["stages"].reason
    for blocks in ((depth,), spread(depth, 4), (4, *spread(depth - 4, 3)[1:])):
        wanted = turn(replace(fast, blocks=blocks), "run")
        assert (wanted.manifest.stages.blocks, dict(wanted.choices)["stages"].reason) == (blocks, "set by --stages")
    large = turn(Wish(parameters=BILLION), "run")
    assert large.manifest.stages.count > 1
    assert dict(large.choices)["whole models"].value == "too large"


@pytest.mark.parametrize("size", SIZES)
def test_a_step_fills_the_pipeline_and_the_warm_up_ends(size: int) -> None:
    for total in (None, 10 * MILLION):
        manifest = turn(Wish(parameters=size, total_tokens=total), "run").manifest
        assert manifest.microbatches_per_step >= 4 * manifest.stages.count
        warm, end = manifest.training.schedule_tokens
        assert warm <= end / 2
        assert end == (20 * parameters_of(manifest) if total is None else total)


@pytest.mark.parametrize(("mbit_s", "residual"), [(20, 64), (100, 64), (1000, 0)])
def test_hops_are_narrow_where_links_decide(mbit_s: int, residual: int) -> None:
    wish = Wish(parameters=1_500_000_000, peers=Peers(number=12, mbit_s=mbit_s), tokens=tokens(LLAMA_2))
    turned = turn(wish, "run")
    assert (turned.manifest.model.residual, "residual" in dict(turned.choices)) == (residual, residual > 0)
    assert parameters_of(turned.manifest) == pytest.approx(1_500_000_000, rel=0.1)
    wide, seen = (forecast(run.manifest, 12 * GB) for run in (turn(replace(wish, residual=0), "run"), turned))
    assert seen.tokens_per_s(mbit_s) >= wide.tokens_per_s(mbit_s) * (5 if residual else 1)
    if residual:
        assert seen.token_bytes == 2 * 64 * (1 + 4 / 128) + 2, "with two bytes of the token's number"


def test_the_forecast_adds_up() -> None:
    manifest = turn(Wish(parameters=BILLION, peers=Peers(card=12 * GB), residual=0), "run").manifest
    seen = forecast(manifest, 12 * GB)
    assert seen.token_bytes == pytest.approx(2 * manifest.model.hidden * (1 + 4 / 128))
    assert seen.tokens_per_s(20) == pytest.approx(20e6 / 8 / seen.token_bytes)
    assert seen.tokens_per_s(20) <= seen.tokens_per_s(100) <= seen.tokens_per_s(1000) <= seen.computed_per_s
    assert seen.total_tokens == 20 * parameters_of(manifest)
    assert seen.stage.device > seen.data_node.device
    assert forecast(manifest, 24 * GB).computed_per_s > seen.computed_per_s
    largest = max(parameter_bytes(parameter_shapes(manifest, module)) for module in manifest.modules()[1:])
    assert seen.round_bytes == pytest.approx(largest * (9 + 17) / 128, rel=0.01), "INT2 there, INT4 back, and scales"
