"""Setup of a local swarm: keys, ports, a signed manifest, and each node's command line."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from node.context.options import LogLevel, NodeOptions, parse_stages, without_settings
from node.data.local_paths import as_written
from node.experts.router import router_file
from node.model.machine_limits import usable_cores
from node.model.moments import DEFAULT_SLOTS, MomentType
from protocol.identity.invitations import Grant
from protocol.identity.keys import Identity
from protocol.libp2p.child_process import with_packages
from protocol.manifest.join_link import JoinLink, multiaddr_of
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import run_id_of, sign_manifest
from protocol.transport.settings import free_ports
from swarm.vocabulary.errors import ConfigError, ResourceExhausted
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned, RunId

HOST = "127.0.0.1"
LINK_PEERS = 2  # Peers named in the link, so that one may fail.


IDENTITIES = "identities"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    host: str = HOST
    advertise: str | None = None  # None: `host`.
    command: tuple[str, ...] | None = None  # None: the swarm's command.

    @property
    def advertised_host(self) -> str:
        return self.advertise or self.host


Deployments = Callable[[int], Deployment]


def all_local(index: int) -> Deployment:
    return Deployment()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSwarmOptions:
    """Options of a local swarm: number of nodes and the settings of each."""

    peers: int
    stages: tuple[str, ...] = ()  # `--stages` of each of the first peers. Empty: one module each.
    device: str = "auto"
    steps: int | None = None
    threads: int | None = None  # None: an equal share of this machine's cores.
    checkpoint_dir: Path | None = None  # Also holds the nodes' keys, so that a second start resumes.
    checkpoint_every_s: float = 300.0
    memory_limits: tuple[int, ...] = ()  # In bytes: one for all or one for each; the largest goes to the largest need.
    moments: MomentType = MomentType.FLOAT32
    moving: bool = False
    log_dir: Path | None = None
    log_level: str = "warning"
    model: Path | None = None
    router: bytes = b""
    port_base: int | None = None  # First of the nodes' consecutive ports. None: free ones.
    author_path: Path | None = None  # Key that signs the manifest. None: the first peer's.

    @property
    def threads_per_node(self) -> int:
        return self.threads or max(1, usable_cores() // self.peers)


@dataclass(frozen=True, slots=True)
class PlannedPeer:
    """A node of a local swarm, planned or running."""

    index: int
    module: ModuleId
    peer: PeerId
    identity_path: Path
    port: int
    dht_port: int
    deployment: Deployment
    memory_limit: int | None = None
    stages: str | None = None  # All stages that it hosts. None: that of its module.

    @property
    def stage(self) -> int:
        return self.module.stage

    @property
    def address(self) -> str:
        return f"{multiaddr_of(self.deployment.advertised_host, self.dht_port)}/p2p/{self.peer}"


def assign_modules(peers: int, blocks: Sequence[int], experts: Sequence[int] | None = None) -> list[ModuleId]:
    """Assigns modules to peers: a peer for each module, then more where a peer has most blocks. Raises ConfigError."""
    experts = experts or (1,) * len(blocks)
    modules = [ModuleId(stage, expert) for stage, count in enumerate(experts) for expert in range(count)]
    if peers < len(modules):
        several = len(modules) > len(blocks)
        raise ConfigError(
            f"{peers} peers cannot host {len(modules)} {'modules' if several else 'stages'}",
            hint=f"Start at least {len(modules)} peers (--peers {len(modules)}), or use a manifest with fewer"
            f" {'experts' if several else 'stages'}.",
        )
    hosted = list(modules)
    while len(hosted) < peers:
        hosted.append(max(modules, key=lambda m: blocks[m.stage] / experts[m.stage] / hosted.count(m)))
    return hosted


def match_limits(
    manifest: Manifest, modules: Sequence[ModuleId], limits: Sequence[int], moments: MomentType = MomentType.FLOAT32
) -> list[int | None]:
    """Assigns limits to the peers of `modules`, the largest to the largest need. Raises ConfigError, OutOfMemory."""
    if not limits:
        return [None] * len(modules)
    if len(limits) == 1:
        limits = [*limits] * len(modules)
    if len(limits) != len(modules):
        raise ConfigError(
            f"{len(limits)} memory limits do not match {len(modules)} peers", hint="Give one limit, or one per peer."
        )
    from node.model.device import choose_device  # imports torch, which takes seconds
    from node.model.memory_need import free_memory_on, needs_of, none_fits

    needs = needs_of(manifest, DEFAULT_SLOTS, moments)
    free = free_memory_on(choose_device("auto").value)
    order = sorted(range(len(modules)), key=lambda index: needs[modules[index]].all)
    matched: list[int | None] = [None] * len(modules)
    for index, limit in zip(order, sorted(limits), strict=True):
        matched[index] = limit
        within = free.within(Reasoned(limit, "under --memory-limit"))  # each node would refuse too, after seconds
        if within.lacks(needs[modules[index]]) is not None:
            raise none_fits(manifest, [modules[index]], within, DEFAULT_SLOTS, moments)
    return matched


class LocalSetup:
    """The folder of a local swarm, mode 0700: manifest, and keys unless in the checkpoint folder. Call `remove`."""

    def __init__(self, manifest: Manifest, options: LocalSwarmOptions, deployments: Deployments = all_local) -> None:
        modules = [ModuleId(parse_stages(each)[0]) for each in options.stages]
        if not modules:
            modules = assign_modules(options.peers, manifest.stages.blocks, manifest.stages.experts_of_each)
        self._options, self._manifest, self._deployments = options, manifest, deployments
        self.peers: list[PlannedPeer] = []
        self.ended, self.returned = set[int](), set[int]()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="skipstone-"))
        except OSError as error:
            raise ResourceExhausted(f"cannot create a temporary folder: {error.strerror or error}") from error
        # A snapshot belongs to a peer id, so the keys must last as long as the snapshots.
        self._keys = self._folder if options.checkpoint_dir is None else options.checkpoint_dir / IDENTITIES
        try:
            self.run: RunId = run_id_of(manifest)
            base, count = options.port_base, 2 * len(modules)
            ports = iter(self._free_ports(count) if base is None else range(base, base + count))
            limits = match_limits(manifest, modules, options.memory_limits, options.moments)
            for module, limit in zip(modules, limits, strict=True):
                self._plan(module, next(ports), next(ports), limit)
            author = Identity.load_or_create(options.author_path or self.peers[0].identity_path)
            self._invitation = Grant.issue(author, self.run, uses=0, expires=2**64 - 1)
            self._manifest_path = self._folder / "manifest.toml"
            self._manifest_path.write_bytes(sign_manifest(manifest, author).text)
            if options.router:
                router_file(self._manifest_path).write_bytes(options.router)
        except BaseException:
            self.remove()
            raise

    @property
    def link(self) -> JoinLink:
        # An ended peer cannot be dialled.
        living = [peer for peer in self.peers if peer.index not in self.ended] or self.peers
        return JoinLink(self.run, tuple(peer.address for peer in living[:LINK_PEERS]))

    def add(self, module: ModuleId) -> PlannedPeer:
        return self._plan(module, *self._free_ports(2))

    def arguments(self, peer: PlannedPeer) -> list[str]:
        """Returns a peer's arguments after `skipstone`. The first peer brings the manifest, the others fetch it."""
        # A restarted first peer joins its running swarm by link.
        begins = peer.index == 0 and peer.index not in self.returned
        is_data_node = peer.stage == 0
        stage = str(peer.module if self._manifest.stages.experts_at(peer.stage) > 1 else peer.stage)
        options = NodeOptions(
            link=None if begins else self.link,
            manifest_path=self._manifest_path if begins else None,
            invitation=str(self._invitation) if is_data_node else None,
            stage=stage if peer.stages is None else None,
            stages=peer.stages,
            moving=True if self._options.moving and not is_data_node else None,
            identity_path=peer.identity_path,
            listen=peer.deployment.host,
            advertise=peer.deployment.advertised_host,
            port=0 if peer.stages else peer.port,  # each further module has the next port, which may be taken
            dht_port=peer.dht_port,
            device=self._options.device,
            threads=self._options.threads_per_node,
            memory_limit=None if peer.memory_limit is None else str(peer.memory_limit),
            moments=self._options.moments,
            model=self._options.model.absolute() if self._options.model and peer.index == 0 else None,
            steps=self._options.steps if is_data_node else None,
            checkpoint_dir=self._options.checkpoint_dir,
            checkpoint_every_s=self._options.checkpoint_every_s,
            log_dir=self._options.log_dir,
            yes=True,
            as_json=True,
            stop_on_eof=True,
            log_level=LogLevel(self._options.log_level),
        )
        return ["join", *(self._with_text(options) if is_data_node else options).arguments()]

    def _with_text(self, options: NodeOptions) -> NodeOptions:
        # The person who starts the swarm chose its text, so data nodes may open it.
        where = as_written(self._manifest.data)
        return replace(
            options,
            text=None if where.text is None else where.text.absolute(),
            tokenizer=None if where.tokenizer is None else where.tokenizer.absolute(),
            allow_hub=self._manifest.data.source.startswith("huggingface:"),
        )

    def environment(self) -> dict[str, str]:
        """Returns a node's environment: our packages, a share of the threads, and no node options of this process."""
        packages = str(Path(__file__).resolve().parent.parent.parent)
        threads = str(self._options.threads_per_node)
        return with_packages(without_settings(os.environ), packages, OMP_NUM_THREADS=threads)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _key(self, index: int) -> Path:
        return self._keys / f"peer-{index}.key"

    def _free_ports(self, count: int) -> list[int]:
        # All ports are known before the nodes start. If another program takes one, a node reports that it cannot bind.
        return free_ports(HOST, f"{Identity.load_or_create(self._key(len(self.peers))).peer}{self.run}", count)

    def _plan(self, module: ModuleId, port: int, dht_port: int, memory_limit: int | None = None) -> PlannedPeer:
        index = len(self.peers)
        path, where = self._key(index), self._deployments(index)
        own = Identity.load_or_create(path).peer
        stages = self._options.stages[index] if index < len(self._options.stages) else None
        self.peers.append(PlannedPeer(index, module, own, path, port, dht_port, where, memory_limit, stages))
        return self.peers[-1]


def node_command() -> tuple[str, ...]:
    """Returns the command that starts `skipstone`. `-P` ignores a folder called `node` nearby."""
    return (sys.executable, "-P", "-m", "node")
