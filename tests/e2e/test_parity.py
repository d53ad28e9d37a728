"""A swarm with one replica a stage computes what one process computes: the same losses, the same parameters."""

import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from lab.world.arms import ring_stages
from node.cli.manifests import starting_from
from node.data.feed import TrainingFeed, open_documents
from node.experts.router import Router
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import Deployment, Deployments, LocalSwarmOptions, all_local
from node.model.shapes import demand_of
from node.observability.events import CatchingUp
from node.pipeline.admission import path_rules
from node.solo import trainer
from node.start.cut_model import open_start
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import PeerId
from tests.e2e import small_run as runs
from tests.node.start.tiny_models import write_folder

pytestmark = pytest.mark.e2e

STEPS = 20


@pytest.mark.parametrize(
    ("inner_steps", "residual"),
    [
        pytest.param(50, 0, id="without a round", marks=pytest.mark.long),
        pytest.param(4, 0, id="with five rounds", marks=pytest.mark.long),
        pytest.param(4, 12, id="with five rounds, hops of 12 numbers"),
    ],
)
async def test_a_swarm_equals_one_process(tmp_path: Path, inner_steps: int, residual: int) -> None:
    """Steps wait for each other, so hops put weight gradients off to their idle time; one process does not."""
    text = runs.write_text(tmp_path / "text")
    watch = await _compare(runs.small_run(text, inner_steps=inner_steps, residual=residual), tmp_path)
    assert all((summary.busy_s.idle_work > 0) == (summary.module != "0.0") for summary in watch.summaries())


@pytest.mark.long
@pytest.mark.parametrize("name", ["soap", "muon"])
async def test_a_swarm_with_another_inner_optimizer_equals_one_process(tmp_path: Path, name: str) -> None:
    """SOAP's bases are refreshed in idle time, with the same lag as in one process that has none."""
    inner = {"name": name, "learning_rate": 3e-3}
    await _compare(runs.small_run(runs.write_text(tmp_path / "text"), inner_steps=4, inner=inner), tmp_path)


@pytest.mark.long
async def test_a_swarm_of_whole_documents_equals_one_process(tmp_path: Path) -> None:
    """Microbatches of unequal tokens make the same steps everywhere, and every hop masks alike."""
    manifest = runs.small_run(runs.write_documents(tmp_path / "text"), inner_steps=4, attention="documents")
    texts = iter(TrainingFeed(manifest, open_documents(manifest), PeerId("a")).next, None)
    assert len({text.size for text in islice(texts, 40)}) > 2
    await _compare(manifest, tmp_path)


@pytest.mark.parametrize("attention", [pytest.param("causal", marks=pytest.mark.long), "documents"])
async def test_a_swarm_of_conversations_equals_one_process(tmp_path: Path, attention: str) -> None:
    """Microbatches with unequal numbers of labels: only what the assistant says is learnt, and told as the loss."""
    text = runs.write_conversations(tmp_path / "text")
    manifest = runs.small_run(text, inner_steps=4, attention=attention, labels="assistant")
    texts = list(islice(iter(TrainingFeed(manifest, open_documents(manifest), PeerId("a")).next, None), 40))
    assert len({text.scored for text in texts}) > 5
    assert all(0 < text.scored < text.size for text in texts)
    await _compare(manifest, tmp_path)


@pytest.mark.parametrize("residual", [pytest.param(0, marks=pytest.mark.long), 12])
async def test_a_skipping_swarm_equals_solo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, residual: int) -> None:
    """Each of four stages sees every second microbatch, in both."""
    text, blocks = runs.write_text(tmp_path / "text"), (0, 1, 1, 1, 1)
    manifest = runs.small_run(text, blocks=blocks, per_path=2, inner_steps=4, residual=residual)
    visited = [ring_stages(path_rules(manifest), number) for number in range(manifest.microbatches_per_step)]
    assert all(sum(stage in stages for stages in visited) == 2 for stage in range(1, 5))
    ring_only = Deployment(command=(sys.executable, "-P", "-m", "tests.e2e.ring_only"))
    monkeypatch.setattr(trainer, "planned_stages", lambda manifest: partial(ring_stages, path_rules(manifest)))
    await _compare(manifest, tmp_path, lambda index: ring_only)


async def test_a_swarm_of_experts_equals_one_process(tmp_path: Path) -> None:
    """Four kinds of documents, each a route of its own through two stages of two experts; hops of 12 numbers."""
    manifest, router = runs.run_of_experts(tmp_path / "text")
    manifest = manifest.model_copy(update={"model": manifest.model.model_copy(update={"residual": 12})})
    texts = TrainingFeed(manifest, open_documents(manifest, router=router), PeerId("a"))
    routes = [texts.next().route for _ in range(STEPS * manifest.microbatches_per_step)]
    assert all(len(set(routes[at : at + 4])) == 4 for at in range(0, len(routes), 4))
    await _compare(manifest, tmp_path, router=router)


async def test_a_swarm_that_starts_from_a_model_equals_one_process(tmp_path: Path) -> None:
    """With tied embeddings, norms of heads and biases, and with rounds, so that the first anchor is built upon."""
    model = tmp_path / "model"
    write_folder(model, "qwen3, tied, with biases", tie_word_embeddings=True)
    base = runs.small_run(runs.write_text(tmp_path / "text"), blocks=(0, 2, 2), inner_steps=4)
    manifest = starting_from(model, base, is_default=False, keeps_blocks=True)
    watch = await _compare(manifest, tmp_path, model=model, learnt=0.3)
    fetched = {event.module: event.total_bytes for event in watch.seen if isinstance(event, CatchingUp)}
    assert fetched.keys() == {"1.0", "2.0"}, "the first node alone has the folder"


@pytest.mark.parametrize(
    ("blocks", "stages", "device"),
    [
        pytest.param((0, 1, 1), ("0-2",), "auto", id="one node hosts all modules"),
        pytest.param((0, 1, 1), ("0,2", "1"), "auto", id="a path leaves the node and comes back"),
        pytest.param((1, 1), ("0-1",), "cpu,cpu", id="a module on each of two devices"),
        pytest.param((2,), ("0",), "auto", id="one stage"),
    ],
)
async def test_a_node_of_several_modules_equals_one_process(
    tmp_path: Path, blocks: tuple[int, ...], stages: tuple[str, ...], device: str
) -> None:
    manifest = runs.small_run(runs.write_text(tmp_path / "text"), blocks=blocks, inner_steps=4)
    await _compare(manifest, tmp_path, stages=stages, device=device)


async def _compare(
    manifest: Manifest,
    tmp_path: Path,
    deployments: Deployments = all_local,
    router: Router | None = None,
    model: Path | None = None,
    learnt: float = 0.5,
    stages: tuple[str, ...] = (),
    device: str = "auto",
) -> runs.Watch:
    start = None if model is None else open_start(manifest, model)
    solo = runs.solo_losses(manifest, tmp_path / "solo", STEPS, router=router, start=start)
    options = LocalSwarmOptions(
        peers=len(stages or manifest.modules()),
        stages=stages,
        device=device,
        steps=STEPS,
        threads=1,
        checkpoint_dir=tmp_path / "swarm",
        router=b"" if router is None else router.to_bytes(),
        model=model,
    )
    async with LocalSwarm(manifest, options, deployments=deployments) as swarm:
        watch = runs.Watch(swarm)
        await watch.to_the_end(swarm)
    assert watch.losses() == pytest.approx(solo, abs=1e-4)
    assert solo[-1] < solo[0] - learnt, "nothing was learnt, so that equal losses would show nothing"
    runs.assert_same_parameters(manifest, tmp_path / "swarm", tmp_path / "solo")
    completed = STEPS * manifest.microbatches_per_step
    visits = {str(module): round(completed * demand_of(manifest, module)) for module in manifest.modules()}
    assert {summary.module: summary.accumulated for summary in watch.summaries()} == visits
    return watch
