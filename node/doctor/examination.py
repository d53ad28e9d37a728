"""All checks of `skipstone doctor`: local ones first, then checks with the help of peers."""

import asyncio
import enum
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.concurrency.task_groups import aside
from node.model.machine_limits import GIB, available_memory
from node.model.moments import DEFAULT_SLOTS, MomentType
from node.network.reach_status import ReachMode, ReachStep, Standing, held_by
from node.network.session import NetworkSession, visit
from node.observability.status import parse_status
from node.observability.version import installed_version
from node.reachability.monitor import climb
from node.reachability.port_mapping import Router
from node.reachability.witnesses import Attachments, witnesses_of
from protocol.dht.child import socket_parent
from protocol.interfaces.clock import Clock
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.join_link import Link
from protocol.manifest.manifest import Manifest
from protocol.transport.settings import is_free
from swarm.membership.memory_fit import FreeMemory, size_text
from swarm.vocabulary.errors import PeerError, SkipstoneError, Unreachable
from swarm.vocabulary.types import PeerId, Reasoned

if TYPE_CHECKING:
    import torch


class Level(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: severity, text, and advice."""

    check: str
    level: Level
    found: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return {"check": self.check, "level": self.level.value, "found": self.found, "fix": self.fix}


async def bounded(check: str, look: Callable[[], Sequence[Finding]], limit_s: float) -> Sequence[Finding]:
    """Runs a blocking check in a thread. Errors and timeouts become findings."""
    return await bounded_async(check, lambda: aside(look, limit_s + 1), limit_s)


async def bounded_async(
    check: str, look: Callable[[], Awaitable[Sequence[Finding]]], limit_s: float
) -> Sequence[Finding]:
    """Runs a check on the event loop. Errors and timeouts become findings."""
    try:
        async with asyncio.timeout(limit_s):
            return await look()
    except TimeoutError:
        fix = "Try again when the machine is less busy."
        return [Finding(check, Level.FAIL, f"no result within {limit_s:g} s", fix)]
    except SkipstoneError as error:
        return [Finding(check, Level.FAIL, str(error), error.hint)]
    except OSError as error:
        return [Finding(check, Level.FAIL, f"{error.strerror or error}", "Check the permissions of this user.")]


NVIDIA: Final = Path("/dev/nvidia0")
# Private memory of a node beside its stage, in MiB, as `benchmarks/memory.py --parts node` measures it
OVERHEAD_MIB: Final = {"torch": 145, "Skipstone": 30, "the DHT": 30, "its libp2p daemon": 70}
MANY_FRAGMENTS: Final = 8  # Fragments of the dial for large stages; averaging in parts needs less memory


def look_at_versions() -> Sequence[Finding]:
    """Reports the versions, for a report of a problem; `pip check` compares them with the wanted ones."""
    found = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "hivemind", "grpcio"))
    return [
        Finding("versions", Level.OK, f"Skipstone {installed_version()}, Python {platform.python_version()}, {found}")
    ]


def look_at_device(wish: str) -> Sequence[Finding]:
    """Checks the devices of a node with `--device WISH`. Raises ConfigError if one is missing."""
    from node.model.device import choose_devices, use_cores

    use_cores()
    return [_device(device, wish) for device in sorted(set(choose_devices(wish).value), key=str)]


def _device(device: "torch.device", wish: str) -> Finding:
    import torch

    try:
        flops = matmul_flops(device, 512 if device.type == "cpu" else 4096)
    except RuntimeError as error:  # torch raises it for driver and memory errors
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        fix = "Check the driver and other programs on the GPU."
        return Finding("device", Level.FAIL, f"{device}: {why}", fix)
    if flops is None:
        fix = "Do not train with it: the hardware or driver is broken."
        return Finding("device", Level.FAIL, f"{device} computes wrong products", fix)
    speed = f"a {device.type.upper()} matrix product runs at {flops / 1e9:,.0f} GFLOP/s"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        found = f"{torch.cuda.get_device_name(device)}, {memory}; {speed}"
        if free < 2 * GIB:
            fix = "Stop other programs on the GPU, or choose another one with --device cuda:N."
            return Finding("device", Level.WARN, found, fix)
        return Finding("device", Level.OK, found)
    # A CPU build of torch is a common mistake on a machine with a GPU.
    if device.type == "cpu" and NVIDIA.exists() and wish == "auto":
        found = f"an NVIDIA GPU is here, but torch {torch.__version__} cannot use it; {speed}"
        fix = "Install a build of torch for CUDA, or check `nvidia-smi`."
        return Finding("device", Level.WARN, found, fix)
    return Finding("device", Level.OK, f"{device}, {torch.get_num_threads()} threads; {speed}")


def matmul_flops(device: "torch.device", size: int) -> float | None:
    """Measures the FLOP/s of a float32 product of two [size, size] matrices; None if the result is wrong."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()

    left, right = (torch.ones(size, size, device=device) for _ in range(2))
    product = left @ right  # warm-up: the first product loads libraries
    wait()
    began, times = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < 0.3:  # seconds
        product = left @ right
        wait()
        times += 1
    # Both matrices are all ones, so every element of the product must be exactly `size`.
    return 2 * size**3 * times / elapsed if bool((product == size).all()) else None


def look_at_memory(memory: Callable[[], Reasoned[int | None]] = available_memory) -> Sequence[Finding]:
    """Checks the available memory of the machine or its container."""
    available = memory().value
    if available is None:
        return [Finding("memory", Level.SKIP, "this system does not report its free memory")]
    parts = ", ".join(f"{part} {size}" for part, size in OVERHEAD_MIB.items())
    beside = f"a node takes {sum(OVERHEAD_MIB.values())} MiB beside its stage: {parts}"
    found = f"{available / GIB:.1f} GiB available; {beside}"
    if available < 1 * GIB:
        fix = "Close other programs, or give the container more memory: a node needs 1 GiB plus its stage."
        return [Finding("memory", Level.FAIL, found, fix)]
    if available < 4 * GIB:
        return [Finding("memory", Level.WARN, found, "Enough for small stages; close other programs for larger ones.")]
    return [Finding("memory", Level.OK, found)]


def look_at_stage_memory(
    wish: str, limit: Reasoned[int] | None, moments: MomentType = MomentType.FLOAT32
) -> Sequence[Finding]:
    """Reports how large a stage a node could take. Raises ConfigError if the device is missing."""
    from node.model.memory_need import parameters_that_fit

    free = _free_memory(wish, limit)
    there = free.memory if free.device is None else free.device
    at_once, in_fragments = (parameters_that_fit(free, moments, fragments) for fragments in (1, MANY_FRAGMENTS))
    if at_once is None or in_fragments is None or there.value is None:
        return [Finding("stage", Level.SKIP, "this system does not report its free memory")]
    found = f"a stage of up to {_rough(at_once)} million parameters fits"
    if _rough(in_fragments) != _rough(at_once):
        found += f", {_rough(in_fragments)} in a run with {MANY_FRAGMENTS} fragments"
    return [Finding("stage", Level.OK, f"{found}: {size_text(there.value)} free {there.reason}")]


def what_fits_of(wish: str, limit: Reasoned[int] | None, moments: MomentType, manifest: Manifest) -> Sequence[Finding]:
    """Reports which stages of a run fit this machine. Raises ConfigError if the device is missing."""
    from node.model.memory_need import what_fits

    fits = what_fits(manifest, _free_memory(wish, limit), DEFAULT_SLOTS, moments)
    if not fits.value:
        fix = "Close other programs, raise --memory-limit, or choose a run with smaller stages."
        return [Finding("fits", Level.FAIL, fits.reason, fix)]
    return [Finding("fits", Level.OK, fits.reason)]


def _rough(parameters: int) -> str:
    return f"{parameters // 10**5 / 10:,.1f}"


def _free_memory(wish: str, limit: Reasoned[int] | None) -> FreeMemory:
    from node.model.device import choose_devices
    from node.model.memory_need import free_memory_on

    return free_memory_on(choose_devices(wish).value[0]).within(limit)


def look_at_disk(folders: Iterable[tuple[str, Path]]) -> Sequence[Finding]:
    return [_disk(name, folder) for name, folder in folders]


def _disk(name: str, folder: Path) -> Finding:
    # The folder may not exist yet: look at its nearest existing parent.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fix = "Choose another folder, or change its owner."
        return Finding("disk", Level.FAIL, f"{name}: {there} is not writable", fix)
    free = shutil.disk_usage(there).free
    found = f"{name}: {free / GIB:.1f} GiB free at {folder}"
    if free < 1 * GIB:
        return Finding("disk", Level.FAIL, found, "Free some space: a full disk loses checkpoints and logs.")
    if free < 5 * GIB:
        fix = "Free some space, or choose another folder: checkpoints grow with the stage."
        return Finding("disk", Level.WARN, found, fix)
    return Finding("disk", Level.OK, found)


def look_at_port(host: str, port: int) -> Sequence[Finding]:
    """Checks that a port (0: any free one) can be bound at a local address."""
    where = f"port {port}" if port else "any free port"
    if is_free(host, port):
        return [Finding("port", Level.OK, f"{where} of {host} is available")]
    fix = "Stop the program that uses it (a running node?), or choose another --port or --listen."
    return [Finding("port", Level.FAIL, f"cannot listen on {where} of {host}", fix)]


PATIENCE_S: Final = 20.0
CLOCK_LIMIT_S: Final = 10.0
REACH_LIMIT_S: Final = 120.0
ENTER_LIMIT_S: Final = 60.0
ASK_TIMEOUT_S: Final = 5.0
WRONG_CLOCK_S: Final = 60.0  # beyond this, `protocol.identity.signed_records` rejects records


@dataclass(frozen=True, slots=True)
class Patient:
    """Description of this machine by the options of its future node."""

    device: str
    listen: str
    port: int
    advertise: str | None
    reach: ReachMode
    dht_port: int
    folders: tuple[tuple[str, Path], ...]
    link: Link | None
    memory_limit: Reasoned[int] | None = None
    moments: MomentType = MomentType.FLOAT32


Tell = Callable[[Sequence[Finding]], None]


async def look_in_the_run(link: Link, patient: Patient, tell: Tell) -> None:
    """Connects to the run and reports findings about the run, fitting stages, clock and reachability."""

    async def enter() -> Sequence[Finding]:
        fits = partial(what_fits_of, patient.device, patient.memory_limit, patient.moments)
        async with visit(link, patient.listen, patient.port) as session:
            tell(await bounded_async("run", lambda: _find_peers(session, fits), PATIENCE_S + 10))
            if not _peers(session):
                return [Finding("reach", Level.SKIP, "no peer of the run can test this machine")]
            tell(await bounded_async("clock", lambda: _compare_clocks(session), CLOCK_LIMIT_S))
            return await bounded_async("reach", lambda: _climb(session, patient), REACH_LIMIT_S)

    # Each check has its own limit; this one also bounds entering and leaving the run.
    limit_s = ENTER_LIMIT_S + PATIENCE_S + CLOCK_LIMIT_S + REACH_LIMIT_S
    tell(await bounded_async("reach", enter, limit_s))


async def _find_peers(session: NetworkSession, fits: Callable[[Manifest], Sequence[Finding]]) -> Sequence[Finding]:
    try:
        signed = await session.fetch_manifest(PATIENCE_S)
    except Unreachable as error:
        fix = f"{error.hint} The clock must be right within {WRONG_CLOCK_S:.0f} s."
        return [Finding("run", Level.FAIL, str(error), fix)]
    await session.look_around(signed.manifest)
    hosting = sum(seen.module is not None for seen in session.others())
    return [
        Finding("run", Level.OK, f"{len(_peers(session))} peers of {signed.manifest.name!r} seen"),
        *experts_findings(hosting, len(signed.manifest.modules()), several=signed.manifest.stages.has_experts),
        *await asyncio.to_thread(fits, signed.manifest),
    ]


def experts_findings(hosting: int, modules: int, *, several: bool) -> list[Finding]:
    """Warns if a run with `several` experts per stage has fewer peers than modules."""
    if not several or hosting >= modules:
        return []
    found = f"{hosting} peers for {modules} modules: documents of an unserved expert go to the next best"
    fix = f"Let {modules - hosting} more peers join; each takes an unserved module."
    return [Finding("experts", Level.WARN, found, fix)]


def _peers(session: NetworkSession) -> list[PeerId]:
    return [seen.peer for seen in session.others() if seen.is_reachable]


async def _compare_clocks(session: NetworkSession) -> Sequence[Finding]:
    async def offset(peer: PeerId) -> float | None:
        about = Question(QuestionAbout.STATUS)
        return await clock_offset(lambda: session.transport.ask(peer, about, ASK_TIMEOUT_S), session.own.clock)

    found = await asyncio.gather(*(offset(peer) for peer in _peers(session)[:5]))
    return [clock_finding([seconds for seconds in found if seconds is not None])]


async def clock_offset(ask: Callable[[], Awaitable[bytes]], clock: Clock) -> float | None:
    """Measures how far a peer's clock is ahead of ours, in seconds; None without an answer."""
    before, began = clock.wall(), clock.monotonic()
    try:
        said = parse_status(await ask()).unix_ms
    except PeerError:
        return None
    took = clock.monotonic() - began
    # The peer read its clock about half a round trip after `before`.
    return said / 1000 - (before + took / 2) if said else None


def clock_finding(offsets: Sequence[float]) -> Finding:
    """Judges our clock by its median offset to the peers' clocks, so that one wrong peer does not matter."""
    if not offsets:
        return Finding("clock", Level.SKIP, "no peer reported its time")
    ahead = -statistics.median(offsets)
    found = f"{abs(ahead):.1f} s {'ahead of' if ahead >= 0 else 'behind'} the median of {len(offsets)} peers"
    if abs(ahead) < 5.0:
        return Finding("clock", Level.OK, found)
    level = Level.FAIL if abs(ahead) >= WRONG_CLOCK_S else Level.WARN
    fix = "Synchronize it: `timedatectl set-ntp true`, or your system's settings."
    return Finding("clock", level, found, fix)


async def _climb(session: NetworkSession, patient: Patient) -> Sequence[Finding]:
    router = Router() if patient.reach is ReachMode.AUTO else None
    ask = witnesses_of(session.membership, session.transport)
    try:
        standing = await climb(session.transport.port, patient.advertise, ask, router)
        if standing.step is ReachStep.UNREACHABLE:
            # A node would do the same: hold links through which peers can call it.
            hold = Attachments(session.own, session.membership, session.transport).hold
            standing = held_by(standing, await hold())
        return [reach_finding(standing)]
    finally:
        if router is not None:
            await router.close()


def reach_finding(standing: Standing) -> Finding:
    """Judges reachability. Only warns if unreachable, since a node behind NAT is still useful to peers it can dial."""
    is_unknown = standing.step is ReachStep.UNKNOWN
    level = Level.WARN if is_unknown or standing.step is ReachStep.REVERSE else Level.OK
    if standing.step is ReachStep.UNREACHABLE:
        level = Level.FAIL
    fix = "Try again while other peers of the run are online." if is_unknown else standing.fix
    return Finding("reach", level, f"{standing.step.value}: {standing.reason}", fix)


QUICK_S: Final = 10.0
DEVICE_S: Final = 60.0


async def examine(patient: Patient, tell: Tell) -> None:
    """Runs every check within its time limit and reports findings as they come."""
    local: tuple[tuple[str, Callable[[], Sequence[Finding]], float], ...] = (
        ("versions", look_at_versions, QUICK_S),
        ("device", lambda: look_at_device(patient.device), DEVICE_S),
        ("memory", look_at_memory, QUICK_S),
        ("stage", lambda: look_at_stage_memory(patient.device, patient.memory_limit, patient.moments), DEVICE_S),
        ("disk", lambda: look_at_disk((*patient.folders, ("temporary files", Path(tempfile.gettempdir())))), QUICK_S),
        ("sockets", lambda: look_at_disk((("sockets", Path(socket_parent())),)), QUICK_S),
    )
    for check, look, limit_s in local:
        tell(await bounded(check, look, limit_s))
    ports = [patient.port] if patient.dht_port == 0 else [patient.port, patient.dht_port]
    free = True
    for port in ports:
        found = await bounded("port", lambda port=port: look_at_port(patient.listen, port), QUICK_S)  # type: ignore[misc]
        free = free and all(finding.level is Level.OK for finding in found)
        tell(found)
    if patient.link is None:
        for check, how in (("clock", "compared with"), ("reach", "tested by")):
            tell([Finding(check, Level.SKIP, f"{how} peers: run `skipstone doctor LINK`")])
    elif not free:
        tell([Finding("reach", Level.SKIP, "the port is not free")])
    else:
        await look_in_the_run(patient.link, patient, tell)
