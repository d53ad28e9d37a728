"""A running swarm's model: exported, read back, compared with what the replicas agreed on, and asked for text."""

import asyncio
import json
import signal
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from node.averaging.anchor.anchor import hash_of
from node.averaging.anchor.shared_vector import Vector, layout_of
from node.averaging.state_sync.download import first_hash_list
from node.checkpoint.folder import CheckpointFolder, Header, load_newest, read_manifest
from node.export.open_model import OpenedModel, open_model
from node.export.source import checked_module
from node.export.swarm_source import open_swarm
from node.export.writer import export
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.model.shapes import parameter_shapes
from node.network.loss_report import WHOLE_MODEL, AskedPaths
from node.network.session import visit
from node.observability.events import Note, RoundCommitted, Step
from protocol.manifest.join_link import JoinLink
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError, Unreachable
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId
from tests.e2e.small_run import PATIENCE_S, Watch, events_of, skipstone, small_run, write_text

pytestmark = pytest.mark.e2e

MODULES = ("0.0", "1.0", "2.0")


async def test_a_running_swarm_is_exported_as_its_replicas_agreed(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1), inner_steps=6)
    options = LocalSwarmOptions(peers=4, threads=1, log_dir=tmp_path / "logs")
    async with LocalSwarm(manifest, options) as swarm:
        await _a_round_of_each(swarm, MODULES)
        told: list[tuple[ModuleId, int, int]] = []
        async with open_swarm(swarm.link, lambda *progress: told.append(progress)) as source:
            written = await export(source, tmp_path / "model")
            versions = source.versions
        assert [str(module) for module in versions] == list(MODULES)
        assert told[-1] == (ModuleId(2), written.size_bytes, written.size_bytes)
        proven = {module: await _hashes(swarm.link, manifest, module, version) for module, version in versions.items()}
        options = ("--tokens", "5", "--json", "--device", "cpu")
        code, said, errors = await skipstone("generate", str(swarm.link), "word1", *options)
        assert code == 0, errors
        assert len(json.loads(said)["tokens"]) in range(1, 6)
    rounds = [event for event in events_of(tmp_path / "logs") if isinstance(event, RoundCommitted)]
    committed = {(event.module, event.round, event.digest) for event in rounds}
    for module, version in versions.items():
        assert (str(module), version.round, version.digest.hex()) in committed
        vector = await _exported(tmp_path / "model", manifest, module)
        layout = layout_of(parameter_shapes(manifest, module), 1)
        mine = [hash_of(memoryview(vector[layout.range_of(n, n + 1)].view(np.uint8))) for n in range(layout.chunks)]
        assert tuple(mine) == proven[module][: layout.chunks]


async def _a_round_of_each(swarm: LocalSwarm, modules: Iterable[str]) -> None:
    watch, due = Watch(swarm), set(modules)
    while due:
        event = await watch.until(lambda event: isinstance(event, RoundCommitted))
        assert isinstance(event, RoundCommitted)
        due.discard(event.module)


async def _hashes(link: JoinLink, manifest: Manifest, module: ModuleId, version: AnchorVersion) -> tuple[bytes, ...]:
    """The hash list that the digest stands for, from whoever still keeps the state."""
    layout = layout_of(parameter_shapes(manifest, module), 1)
    async with asyncio.timeout(PATIENCE_S), visit(link) as session:
        session.membership_sync.watch(manifest.modules())
        while not (donors := [known.peer for known in session.membership.with_state(module)]):
            await session.membership_sync.changed.wait()
            session.membership_sync.changed.clear()
        liars: list[PeerId] = []
        hash_list, _ = await first_hash_list(
            session.transport, module, layout, version, donors, lambda peer, why: liars.append(peer)
        )
        assert not liars
        return hash_list.hashes


async def _exported(folder: Path, manifest: Manifest, module: ModuleId) -> Vector:
    async with open_model(str(folder)) as opened:
        parameters = await checked_module(opened.source, module)
    layout = layout_of(parameter_shapes(manifest, module), 1)
    vector: Vector = np.concatenate([parameters[deployment.name].numpy().ravel() for deployment in layout.spans])
    return vector


async def test_a_run_with_a_stage_that_nobody_serves_is_used_around_it(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1, 1, 1), per_path=3, inner_steps=4)
    async with LocalSwarm(manifest, LocalSwarmOptions(peers=5, threads=1)) as swarm:
        await _a_round_of_each(swarm, map(str, manifest.modules()))
        swarm.kill(next(peer.index for peer in swarm.peers if peer.stage == 3), signal.SIGKILL)
        link, some = str(swarm.link), ("--stages-per-path", "2", "--json")
        async with open_swarm(swarm.link, lambda *_: None, patience_s=2.0) as source:
            assert list(source.missing) == [3]
            opened = OpenedModel(source, missing=source.missing)
            with pytest.raises(Unreachable, match="stage 3") as whole:
                opened.narrow(WHOLE_MODEL)
            with pytest.raises(ConfigError, match="of which 3 are available: 1, 2, 4"):
                opened.narrow(AskedPaths(4))
        assert "--stages-per-path 3" in whole.value.hint
        answers = await asyncio.gather(
            skipstone("generate", link, "word1", "--tokens", "5", "--device", "cpu", *some),
            skipstone("eval", link, "--microbatches", "2", *some),
            skipstone("export", link, str(tmp_path / "part"), *some),
        )
    for code, _, errors in answers:
        assert code == 0, errors
        assert "missing: stage 3 (no peer" in errors
        assert "uses stages 0, 1, 4" in errors
    assert json.loads(answers[0][1])["stages"] == [1, 4]
    assert [subset["stages"] for subset in json.loads(answers[1][1])["subsets"]] == [[1, 4]]
    async with open_model(str(tmp_path / "part")) as part:
        assert part.source.modules == (ModuleId(0), ModuleId(1), ModuleId(4))
    assert json.loads((tmp_path / "part" / "config.json").read_text())["num_hidden_layers"] == 2


STEPS = 60


def newest(path: Path, peer: str) -> Header:
    signed = read_manifest(path)
    found = load_newest(CheckpointFolder(path, signed.run, signed.text), PeerId(peer))
    assert found is not None
    assert found.problems == ()
    return found.header


async def test_a_swarm_killed_as_a_whole_goes_on(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1))
    folder = tmp_path / "checkpoint"
    options = LocalSwarmOptions(peers=3, steps=STEPS, threads=1, checkpoint_dir=folder, checkpoint_every_s=0.5)
    async with LocalSwarm(manifest, options) as swarm:
        first = Watch(swarm)
        await first.step(12)
        await first.until(lambda event: all(list((folder / peer.peer).glob("*.json")) for peer in swarm.peers))
        await first.step(30)
        swarm.signal_all(signal.SIGKILL)
        peers = [peer.peer for peer in swarm.peers]
        await first.to_the_end(swarm)
    saved = [newest(folder, peer) for peer in peers]
    position = saved[0].data
    assert position is not None
    assert 0 < saved[0].steps <= len(first.losses()) + 1

    async with LocalSwarm(manifest, options) as swarm:
        assert [peer.peer for peer in swarm.peers] == peers
        second = Watch(swarm)
        await second.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}

    notes = [event.message for event in second.seen if isinstance(event, Note)]
    for header in saved:
        told = f"resumes module {header.owner.module} from snapshot {header.number}: inner step {header.steps},"
        assert any(note.startswith(told) for note in notes), told
    steps = [event for event in second.seen if isinstance(event, Step)]
    assert [event.step for event in steps] == list(range(saved[0].steps + 1, STEPS + 1))
    assert steps[-1].tokens == STEPS * manifest.training.inner_tokens
    before = first.losses()
    assert steps[0].loss < before[0] - 0.5, "it began with untrained weights"
    assert steps[0].loss < before[saved[0].steps - 1] + 0.3
    assert steps[-1].loss < before[-1]

    end = newest(folder, peers[0])
    assert end.data is not None
    assert end.steps == STEPS
    assert end.data.cursor > position.cursor
    assert end.data.completed == STEPS * manifest.microbatches_per_step
    assert abs(end.data.next_number - position.next_number) > 2**20, "numbers of the life before are used again"
    (summary,) = (event for event in second.summaries() if event.module == "0.0")
    assert (summary.microbatches.completed, summary.microbatches.duplicated) == (end.data.completed, 0)

    async with LocalSwarm(manifest, options) as swarm:  # all its steps are done already
        third = Watch(swarm)
        await third.to_the_end(swarm)
        assert {end.exit_code for end in swarm.ends.values()} == {0}, swarm.ends
    assert (third.losses(), newest(folder, peers[0]).steps) == ([], STEPS)
