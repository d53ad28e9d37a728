"""The state on which a replica begins in a run that starts from an existing model, over real links."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from node.averaging.anchor.anchor import Anchor
from node.averaging.module_rounds import first_state
from node.checkpoint.state import ReplicaState, ResumedState
from node.cli.manifests import starting_from
from node.context.module_context import ModuleContext
from node.local_swarm.default_manifest import default_manifest
from node.model.moments import Allowance
from node.observability.events import Event, Note
from node.start.cut_model import CutModel, ModelFolder, first_version, module_layout
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import AnchorVersion, ModuleId
from tests.node.averaging.state_peers import MODULE, Faults, StatePeer, state_swarm
from tests.node.checkpoint.saved_states import state
from tests.node.network.small_swarm import until
from tests.node.start.tiny_models import write_folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, CutModel]:
    folder = tmp_path_factory.mktemp("run") / "model"
    write_folder(folder, "qwen2", hidden_size=56)
    manifest = starting_from(folder, default_manifest(0), is_default=True, keeps_blocks=False)
    return manifest, CutModel(manifest, ModelFolder(folder))


def told(peer: StatePeer, module: ModuleId, anchor: AnchorVersion | None) -> SimpleNamespace:
    return SimpleNamespace(peer=peer.peer, module=module, anchor=anchor)


def context(
    manifest: Manifest,
    joiner: StatePeer,
    peers: Sequence[SimpleNamespace],
    events: list[Event],
    start: CutModel | None = None,
    resumed: ResumedState | None = None,
) -> ModuleContext:
    session = joiner.downloads.session
    looked = asyncio.Event()
    looked.set()
    seen = SimpleNamespace(peers=lambda: peers, with_state=lambda module: [p for p in peers if p.module == module])
    given = SimpleNamespace(
        session=SimpleNamespace(
            own=session.own,
            transport=session.transport,
            dispatcher=session.dispatcher,
            membership=seen,
            membership_sync=SimpleNamespace(looked=looked),
        ),
        manifest=manifest,
        module=MODULE,
        device=torch.device("cpu"),
        options=SimpleNamespace(allowance=Allowance(2), checkpoint_dir=None),
        events=SimpleNamespace(emit=events.append),
        resumed=resumed or ResumedState(),
        start=start,
        proofs=SimpleNamespace(refresh=partial(asyncio.sleep, 0), proven=frozenset()),
    )
    return cast(ModuleContext, given)


async def begun(given: ModuleContext) -> Anchor:
    return (await first_state(given)).anchor


async def test_a_module_comes_from_a_peer_of_another_one_that_has_the_folder(run: tuple[Manifest, CutModel]) -> None:
    manifest, cut = run
    async with state_swarm(module_layout(manifest, MODULE)) as swarm:
        author = await swarm.donor(cut.anchor(ModuleId(0)), module=ModuleId(0), start=cut)
        other = await swarm.donor(cut.anchor(ModuleId(2)), module=ModuleId(2))
        joiner = await swarm.joiner()
        peers = [told(other, ModuleId(2), None), told(author, ModuleId(0), first_version(manifest, ModuleId(0)))]
        got = await begun(context(manifest, joiner, peers, []))
        assert got.version == first_version(manifest, MODULE)
        assert got.hashes == cut.first_anchor(1).hashes
        assert np.array_equal(got.parameters, cut.anchor(MODULE).parameters)
        assert not other.faults.sent
        assert max(author.faults.sent) < got.layout.chunks, "zeros need not travel"


async def test_a_replica_without_a_round_gives_what_it_began_with(run: tuple[Manifest, CutModel]) -> None:
    manifest, cut = run
    async with state_swarm(module_layout(manifest, MODULE)) as swarm:
        replica = await swarm.donor(cut.anchor(MODULE))
        joiner = await swarm.joiner()
        peers = [told(replica, MODULE, first_version(manifest, MODULE))]
        assert (await begun(context(manifest, joiner, peers, []))).version == first_version(manifest, MODULE)


async def test_where_rounds_have_been_what_they_led_to_is_taken(run: tuple[Manifest, CutModel]) -> None:
    manifest, _ = run
    agreed = state(3, module_layout(manifest, MODULE))
    async with state_swarm(agreed.layout) as swarm:
        replica = await swarm.donor(agreed)
        got = await begun(context(manifest, await swarm.joiner(), [told(replica, MODULE, agreed.version)], []))
        assert got.version == agreed.version
        assert np.array_equal(got.momentum, agreed.momentum)


async def test_who_only_says_that_there_were_rounds_keeps_nobody_out(run: tuple[Manifest, CutModel]) -> None:
    manifest, cut = run
    layout = module_layout(manifest, MODULE)
    async with state_swarm(layout) as swarm:
        liar = await swarm.donor(state(1, layout))
        author = await swarm.donor(cut.anchor(ModuleId(0)), module=ModuleId(0), start=cut)
        joiner = await swarm.joiner()
        peers = [
            told(liar, MODULE, state(9, layout).version),
            told(author, ModuleId(0), first_version(manifest, ModuleId(0))),
        ]
        assert (await begun(context(manifest, joiner, peers, []))).version == first_version(manifest, MODULE)


async def test_other_weights_are_not_taken_and_the_right_ones_waited_for(run: tuple[Manifest, CutModel]) -> None:
    manifest, cut = run
    async with state_swarm(module_layout(manifest, MODULE)) as swarm:
        liar = await swarm.donor(cut.anchor(MODULE), Faults(corrupt=True))
        joiner = await swarm.joiner()
        peers, events = [told(liar, MODULE, first_version(manifest, MODULE))], list[Event]()
        beginning = asyncio.create_task(begun(context(manifest, joiner, peers, events)))
        await until(
            lambda: any(
                isinstance(event, Note) and "waiting for a peer with module" in event.message for event in events
            )
        )
        assert liar.faults.sent
        assert not beginning.done()
        honest = await swarm.donor(cut.anchor(ModuleId(0)), module=ModuleId(0), start=cut)
        peers[:] = [told(honest, ModuleId(0), None)]
        assert (await beginning).version == first_version(manifest, MODULE)


async def test_a_folder_that_was_damaged_since_is_not_given_out(run: tuple[Manifest, CutModel], tmp_path: Path) -> None:
    manifest, _ = run
    write_folder(tmp_path / "model", "qwen2", hidden_size=56)
    cut = CutModel(manifest, ModelFolder(tmp_path / "model"))
    cut.digests()
    async with state_swarm(module_layout(manifest, MODULE)) as swarm:
        author = await swarm.donor(cut.anchor(ModuleId(0)), module=ModuleId(0), start=cut)
        with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            size = file.seek(0, 2)
            file.seek(data)
            file.write(b"\x11" * (size - data))
        joiner = await swarm.joiner()
        events: list[Event] = []
        peers = [told(author, ModuleId(0), None)]
        beginning = asyncio.create_task(begun(context(manifest, joiner, peers, events)))
        await until(lambda: bool(events) and isinstance(events[-1], Note))
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)


async def test_what_the_seed_or_a_snapshot_gives_is_asked_of_nobody(run: tuple[Manifest, CutModel]) -> None:
    manifest, cut = run
    async with state_swarm(module_layout(manifest, MODULE)) as swarm:
        joiner = await swarm.joiner()
        assert (await first_state(context(default_manifest(0), joiner, [], []))).anchor is None
        resumed = ResumedState(MODULE, cast(ReplicaState, object()))
        assert (await first_state(context(manifest, joiner, [], [], resumed=resumed))).anchor is None
        assert (await begun(context(manifest, joiner, [], [], start=cut))).version == first_version(manifest, MODULE)


async def test_sizes_are_compared_with_the_machine_before_anything_is_fetched(
    run: tuple[Manifest, CutModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = run

    def full(*given: object) -> None:
        raise ResourceExhausted("there is no room")

    monkeypatch.setattr("node.averaging.module_rounds.require_memory", full)
    async with state_swarm(module_layout(manifest, MODULE)) as swarm:
        joiner = await swarm.joiner()
        with pytest.raises(ResourceExhausted):
            await first_state(context(manifest, joiner, [], []))


async def test_a_donor_gives_first_anchors_of_its_own_run_alone(run: tuple[Manifest, CutModel]) -> None:
    manifest, cut = run
    async with state_swarm(module_layout(manifest, MODULE)) as swarm:
        author = await swarm.donor(cut.anchor(ModuleId(0)), module=ModuleId(0), start=cut)
        joiner = await swarm.joiner()
        for module, digest in ((MODULE, bytes(32)), (ModuleId(200), first_version(manifest, MODULE).digest)):
            question = Question(QuestionAbout.STATE, module=module, digest=digest)
            with pytest.raises(Exception, match="does not have state"):
                await joiner.transport.ask(author.peer, question, 10.0)
