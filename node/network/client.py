"""Queries of a running swarm by a client that hosts no module: `status` and `eval`."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any

from node.network.loss_report import WHOLE_MODEL, AskedPaths, loss_in, loss_report
from node.network.session import PAUSE_S, NetworkSession, visit
from node.observability.status import PeerStatus, SwarmStatus, parse_answer, parse_status
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.join_link import Link
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import PeerError, Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, PeerState

WATCH_S = 3.0
GAP_PATIENCE_S = 3.0  # Time for the directory to name peers of stages that a path may skip


Statuses = Callable[[], AsyncGenerator[SwarmStatus]]


async def query_status(link: Link, patience_s: float = 30.0) -> SwarmStatus:
    """Asks a run's peers for their status. Raises Unreachable if no peer answers within `patience_s` seconds."""
    async with aclosing(statuses(link, patience_s)) as seen:
        return await anext(seen)


async def statuses(link: Link, patience_s: float = 30.0) -> AsyncGenerator[SwarmStatus]:
    """Yields a run's status every `WATCH_S` seconds. Raises Unreachable if at first no peer answers."""
    async with visit(link) as session:
        signed = await session.fetch_manifest(patience_s)
        async with aclosing(statuses_of(session, signed.manifest)) as seen:
            async for status in seen:
                yield status


async def statuses_of(
    session: NetworkSession, manifest: Manifest, most: int | None = None
) -> AsyncGenerator[SwarmStatus]:
    """Yields the status of the session's run every `WATCH_S` seconds, with this node's own.

    `most`: ask this node's peers and at most so many others, data nodes first, and look up no more.
    """
    stages = manifest.stages
    modules = tuple(map(str, manifest.modules())) if stages.has_experts else None
    while True:
        seen = session.others() if most is not None else await session.look_around(manifest)
        if session.own.state is not PeerState.VISITING:
            seen.append(session.own.announcement())
        here = session.transport.here()
        seen.sort(key=lambda a: (a.peer not in here, a.module != ModuleId(0), random.random()))  # noqa: S311
        places = len(seen) if most is None else len(here) + most
        asked = (_peer_status(session, each, ask=place < places) for place, each in enumerate(seen))
        peers = sorted(await asyncio.gather(*asked), key=lambda peer: peer.peer)
        yield SwarmStatus.of(session.run, manifest.name, stages.count, tuple(peers), modules)
        await asyncio.sleep(WATCH_S if most is None else 5.0)  # less often, because each node of a run may sample


async def query_evaluation(
    link: Link, microbatches: int, paths: AskedPaths = WHOLE_MODEL, patience_s: float = 30.0
) -> dict[str, Any]:
    """Asks a data node to measure the held-out loss (see `loss_report`). Raises ConfigError, Unreachable."""
    async with visit(link) as session:
        manifest = (await session.fetch_manifest(patience_s)).manifest
        return await evaluation(session, manifest, microbatches, paths, patience_s)


async def evaluation(
    session: NetworkSession,
    manifest: Manifest,
    microbatches: int,
    paths: AskedPaths = WHOLE_MODEL,
    patience_s: float = 30.0,
) -> dict[str, Any]:
    """Does the same as `query_evaluation`, from an open session."""
    await find_peers(session, manifest, patience_s)
    now, every = session.own.clock.monotonic, range(1, manifest.stages.count)
    deadline = now() + (patience_s if paths.stages_per_path is None else GAP_PATIENCE_S)
    while True:
        served = {module.stage for module in session.membership.served(now()) if module is not None}
        if served.issuperset(every) or now() >= deadline:
            break
        await asyncio.sleep(PAUSE_S)
    missing = {stage: "no peer" for stage in every if stage not in served}
    subsets = paths.of(manifest, served.intersection(every), missing)

    async def ask(peer: PeerId) -> dict[str, Any]:
        measured = []
        for stages in subsets:
            question = Question(QuestionAbout.EVALUATE, microbatches, stages=stages)
            answer = await session.transport.ask(peer, question, 600.0)  # the whole model over the held-out text
            measured.append((stages, loss_in(parse_answer(answer))))
        return loss_report(measured)

    def is_data_node(peer: PeerId) -> bool:
        announcement = session.membership.get(peer)
        return announcement is not None and announcement.module == ModuleId(0)

    return await session.first_answer(
        ask, is_data_node, patience_s, "that hosts stage 0 has measured the held-out loss"
    )


async def find_peers(session: NetworkSession, manifest: Manifest, patience_s: float) -> None:
    """Finds the peers that announce a module, and checks which of them are online. Raises Unreachable."""
    session.membership_sync.watch(manifest.modules())
    try:
        async with asyncio.timeout(patience_s):
            await session.membership_sync.looked.wait()
    except TimeoutError:
        raise Unreachable(f"cannot read the swarm's directory within {patience_s:.0f} s") from None
    await session.membership_sync.alive(manifest.modules())


async def _peer_status(session: NetworkSession, said: Announcement, *, ask: bool) -> PeerStatus:
    """Combines a peer's announcement with its status, if it is asked and answers."""
    answered, question = None, Question(QuestionAbout.STATUS)
    with suppress(PeerError):
        answered = None if not ask else parse_status(await session.transport.ask(said.peer, question, 5.0))
    return PeerStatus(
        peer=said.peer,
        module=None if said.module is None else str(said.module),
        state=said.state.name.lower(),
        addresses=said.addresses,
        via=said.via,
        tokens_per_s=said.tokens_per_second,
        slots=said.slots,
        free_slots=said.free_slots,
        steps=said.steps,
        round=0 if said.anchor is None else said.anchor.round,
        digest="" if said.anchor is None else said.anchor.digest.hex(),
        answered=answered,
    )
