"""Objects shared by the parts of a node that work in one module."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from node.checkpoint.saver import SaveRequests
from node.checkpoint.state import ResumedState
from node.concurrency.compute_thread import ComputeThread, DeviceThreads
from node.context.options import NodeOptions
from node.data.local_paths import LocalPaths
from node.experts.router import Router
from node.network.proofs import Proofs
from node.network.session import NetworkSession
from node.observability.events import EventSink
from node.start.cut_model import CutModel
from protocol.identity.signatures import Routes
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import ModuleId, Reasoned


@dataclass(frozen=True, slots=True)
class ModuleContext:
    """Objects that the parts of a hosted module share: identity, run, module, device and interfaces."""

    options: NodeOptions
    session: NetworkSession
    routes: Routes
    manifest: Manifest
    module: ModuleId
    device: torch.device  # First device of the node; holds the module's state.
    threads: DeviceThreads
    compute: ComputeThread
    events: EventSink
    finished: Callable[[], None]  # Called when a data node has finished its steps.
    saves: SaveRequests
    proofs: Proofs
    resumed: ResumedState
    start: CutModel | None
    router: Router | None
    text: Reasoned[LocalPaths | None]  # Where the run's text may be opened; a data node always has a place.
