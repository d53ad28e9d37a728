"""A swarm of real processes routes documents by tables that it has learnt while it trained: each block that begins is
packed by the tables of stage 0's last round, on every data node alike, whoever was there when they were learnt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from node.checkpoint.folder import CheckpointFolder, load_newest, read_manifest
from node.experts.block_routers import BlockRouters
from node.experts.router import Router
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.observability.events import CaughtUp, Completed, Event, RoundCommitted
from swarm.experts.routes import best_route
from swarm.vocabulary.types import PeerId
from tests.e2e.round_watch import LogTail
from tests.e2e.run_that_reshards import ALPHABETS, FIRST, LEARNT, OF_EACH, run_that_reshards, text_of
from tests.e2e.small_run import Watch

pytestmark = pytest.mark.e2e

DATA_NODE = "0.0"


def is_common(event: Event, peers: set[str]) -> bool:
    """Whether it is a round of stage 0 to which all these contributed."""
    return isinstance(event, RoundCommitted) and event.module == DATA_NODE and peers <= set(event.contributors)


def router_of_block(folder: Path, peer: str, first: Router) -> Router:
    """By which the data node packed the block that it was in when it stopped."""
    signed = read_manifest(folder)
    found = load_newest(CheckpointFolder(folder, signed.run, signed.text), PeerId(peer))
    assert found is not None
    assert found.header.data is not None
    saved = found.header.data.cursor.routed_by
    assert saved, "its block is packed by the manifest's router"
    router = BlockRouters(first).saved(saved).router
    assert isinstance(router, Router)
    return router


def routes_by(router: Router) -> set[tuple[int, ...]]:
    """Of the run's documents."""
    openings = [
        text_of(letters, number).encode()[: router.prefix] for letters in ALPHABETS for number in range(OF_EACH)
    ]
    return {best_route(router.affinity("", np.frombuffer(each, np.uint8).astype(np.int64))) for each in openings}


async def test_blocks_are_packed_by_learnt_tables_and_a_newcomers_first_one_too(tmp_path: Path) -> None:
    """Only learnt tables have documents for the second expert. The data node that was there from the start goes there
    when its second block begins, the newcomer at once: it has them from nowhere but the anchor that it was given."""
    manifest, router = run_that_reshards(tmp_path / "text")
    assert routes_by(router) == {FIRST}
    saved, logs = tmp_path / "saved", tmp_path / "logs"
    options = LocalSwarmOptions(peers=3, threads=1, checkpoint_dir=saved, log_dir=logs, router=router.to_bytes())
    async with LocalSwarm(manifest, options) as swarm:
        watch, old, tail = Watch(swarm), swarm.peers[0].peer, LogTail(logs, Completed)
        await tail.until(lambda _, event: event.peer == old and event.route == LEARNT)
        swarm.start_peer(0)
        new = swarm.peers[-1].peer
        await tail.until(lambda _, event: event.peer == new and event.route == LEARNT)
        tail.close()
        for peer in (old, new):
            await watch.until(lambda event, peer=peer: is_common(event, {old, new}) and event.peer == peer)
        swarm.request_stop()
        await watch.to_the_end(swarm)
    assert {end.exit_code for end in swarm.ends.values()} == {0}
    began = next(event for event in watch.seen if isinstance(event, CaughtUp) and event.peer == new)
    assert began.round > 0
    for peer in (old, new):
        found = router_of_block(saved, peer, router)
        assert found.to_bytes() != router.to_bytes()
        assert routes_by(found) == {FIRST, LEARNT}
    anchors = {(event.round, event.digest) for event in watch.seen if is_common(event, {old, new})}
    assert len({number for number, _ in anchors}) == len(anchors), "both hold the same tables after each common round"
