"""A running swarm as a source of modules. Each module has the state of its last round, checked by its digest."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from node.averaging.anchor.anchor import tensors_of
from node.averaging.state_sync.download import FreshSpace, StateDownloads
from node.experts.router import Router
from node.export.source import Parameters
from node.model.shapes import parameter_bytes, parameter_shapes
from node.network.client import GAP_PATIENCE_S, find_peers
from node.network.peer_files import fetch_router
from node.network.proofs import Proofs
from node.network.session import NetworkSession, visit
from node.start.cut_model import module_layout
from protocol.identity.signatures import EntrySigner
from protocol.manifest.join_link import Link
from protocol.manifest.signing import SignedManifest
from swarm.averaging.schedule import choose_version, voters
from swarm.vocabulary.errors import NoQuorum, Stalled, Unreachable
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId

log = logging.getLogger(__name__)

Progress = Callable[[ModuleId, int, int], None]  # Module, bytes of all modules so far, total bytes

PATIENCE_S: Final = 30.0
ATTEMPTS: Final = 4
PAUSE_S: Final = 0.3


class SwarmSource:
    """ModuleSource that downloads the current anchors of a running swarm's modules. Made by `open_swarm`."""

    def __init__(self, session: NetworkSession, signed: SignedManifest, on_progress: Progress) -> None:
        manifest = signed.manifest
        self.signed = signed
        self.modules = manifest.modules()
        self.missing: dict[int, str] = {}  # Why a stage cannot be read
        self.versions: dict[ModuleId, AnchorVersion] = {}
        self._session = session
        self._on_progress = on_progress
        self._here: dict[ModuleId, int] = {}
        self._downloads: dict[ModuleId, StateDownloads] = {}
        self._proofs: dict[ModuleId, Proofs] = {}
        self._signer = EntrySigner(session.identity, session.run, signed.guests())

    async def router(self) -> Router | None:
        """Downloads the run's router. Raises Unreachable if no peer sends the router."""
        return await fetch_router(self._session, self.signed.manifest, PATIENCE_S)

    async def module(self, module: ModuleId) -> Parameters:
        """Downloads the module's parameters. Raises NoQuorum, Stalled, and the errors of `agreed`."""
        if module not in self._downloads:
            self._downloads[module] = StateDownloads(
                self._session,
                module,
                FreshSpace(module_layout(self.signed.manifest, module)),
                on_progress=lambda done, total: self._came(module, done),
            )
        for attempt in range(1, ATTEMPTS + 1):  # a round may commit during the download, so retry with the new state
            version, donors = await self.agreed(module)
            try:
                vector = await self._downloads[module].parameters(version, donors)
            except (NoQuorum, Stalled) as error:
                log.info("module %s, attempt %d of %d: %s", module, attempt, ATTEMPTS, error)
                if attempt == ATTEMPTS:
                    raise type(error)(f"module {module}: {error}", hint="Retry when its replicas are online.") from None
                await asyncio.sleep(2.5)
            else:
                self.versions[module] = version
                return tensors_of(module_layout(self.signed.manifest, module), vector)
        raise AssertionError("the last attempt returns or raises")

    async def agreed(
        self, module: ModuleId, patience_s: float = PATIENCE_S
    ) -> tuple[AnchorVersion, tuple[PeerId, ...]]:
        """Waits up to `patience_s` for an agreed anchor. Returns and raises what `state_to_take` does."""
        clock, membership = self._session.own.clock, self._session.membership
        deadline = clock.monotonic() + patience_s
        proofs = self._proofs.setdefault(module, Proofs(self._session, module, self._signer))
        while True:
            await proofs.refresh()
            known = {a.peer: a.anchor for a in membership.with_state(module) if a.anchor is not None}
            announced = voters(known, proofs.proven)
            if choose_version(announced).value is not None or clock.monotonic() >= deadline:
                manifest = self.signed.manifest
                return state_to_take(
                    module, announced, manifest.training.inner_steps, is_model=manifest.start is not None
                )
            await asyncio.sleep(PAUSE_S)

    def _came(self, module: ModuleId, done: int) -> None:
        self._here[module] = done
        total = sum(parameter_bytes(parameter_shapes(self.signed.manifest, each)) for each in self._downloads)
        self._on_progress(module, sum(self._here.values()), total)


@asynccontextmanager
async def open_swarm(
    link: Link, on_progress: Progress, patience_s: float = PATIENCE_S, stages_per_path: int | None = None
) -> AsyncIterator[SwarmSource]:
    """Joins the swarm without serving a module, and finds out which modules are missing. Raises Unreachable."""
    async with visit(link) as session:
        signed = await session.fetch_manifest(patience_s)
        await find_peers(session, signed.manifest, patience_s)
        source, stages = SwarmSource(session, signed, on_progress), signed.manifest.stages
        may_miss = 0 if stages_per_path is None else stages.count - 1 - stages_per_path
        clock = session.own.clock
        begun = clock.monotonic()
        # With experts, the caller may only need some of the modules.
        for module in source.modules[:1] if stages.has_experts else source.modules:
            limit_s = GAP_PATIENCE_S if module.stage and len(source.missing) < may_miss else patience_s
            try:
                await source.agreed(module, begun + limit_s - clock.monotonic())
            except (Unreachable, NoQuorum) as error:
                source.missing[module.stage] = str(error)
        source.modules = tuple(module for module in source.modules if module.stage not in source.missing)
        yield source


def state_to_take(
    module: ModuleId, announced: Mapping[PeerId, AnchorVersion], inner_steps: int, *, is_model: bool = False
) -> tuple[AnchorVersion, tuple[PeerId, ...]]:
    """Returns the agreed anchor and its peers. Raises Unreachable, NoQuorum.

    `is_model`: whether round 0 counts, because the run started from a trained model.
    """
    if not announced:
        raise Unreachable(f"no peer serves module {module}", hint="Try again when `skipstone status` shows one.")
    chosen = choose_version(announced)
    version = chosen.value
    if version is None:
        raise NoQuorum(f"module {module}: {chosen.reason}", hint="Try again after its next round.")
    if version.round == 0 and not is_model:
        raise NoQuorum(
            f"module {module} has not completed a round, so its replicas only agree on the initial weights",
            hint=f"Try again after its first round, due after {inner_steps} inner steps (see `skipstone status`).",
        )
    return version, tuple(peer for peer, announced_version in announced.items() if announced_version == version)
