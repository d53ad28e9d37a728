"""The checks of this machine: versions, device, memory, the stages that fit, disk, open files, ports."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.doctor.finding import Finding, Level
from node.model.free_memory import GIB, available_memory
from node.model.moments import MomentType
from protocol.manifest.manifest import Manifest
from swarm.membership.room import Room, size_text
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.types import Reasoned

if TYPE_CHECKING:
    import torch

LIBRARIES: Final = ("torch", "hivemind", "grpcio")
"""Libraries whose versions decide whether a node works. pip looks after the rest."""
MEASURE_S: Final = 0.3
CPU_SIZE: Final = 512
GPU_SIZE: Final = 4096
LITTLE_GPU_BYTES: Final = 2 * GIB
NVIDIA: Final = Path("/dev/nvidia0")
LITTLE_MEMORY_BYTES: Final = 4 * GIB
NO_MEMORY_BYTES: Final = 1 * GIB
"""Torch, gRPC and the DHT's process alone take more than half of that."""
LITTLE_DISK_BYTES: Final = 5 * GIB
NO_DISK_BYTES: Final = 1 * GIB
FEW_FILES: Final = 1024
"""Twice 256 links and the DHT's connections."""
TOO_FEW_FILES: Final = 256
ROUGH: Final = 10**5
"""Step in which numbers of parameters are shown."""
MANY_FRAGMENTS: Final = 8
"""Fragments that `new --size` gives runs of large stages."""

_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)")
_CLAUSE: Final = re.compile(r"(==|>=|<)\s*([0-9][0-9.]*?)(\.\*)?")


# ---- versions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WantedVersions:
    """The versions that pyproject.toml asks for, such as `>=3.11` or `==2.13.*`."""

    python: str
    libraries: dict[str, str]


def look_at_versions() -> Sequence[Finding]:
    """Checks the versions in this process's Python."""
    return versions(wanted_here(), platform.python_version(), _installed)


def versions(wanted: WantedVersions, python: str, installed: Callable[[str], str | None]) -> list[Finding]:
    """Compares Python and each of LIBRARIES with what is wanted; `installed` returns None for a missing library."""
    anew = f"Install Python {wanted.python} and make the environment anew."
    findings = [_compared("python", python, wanted.python, anew)]
    for name in LIBRARIES:
        specifier = wanted.libraries.get(name, "")
        findings.append(_compared(name, installed(name), specifier, f"pip install '{name}{specifier}'"))
    return findings


def wanted_here() -> WantedVersions:
    """Returns the versions that the installed package asks for, else pyproject.toml beside the sources."""
    try:
        about = metadata.metadata("skipstone")
        python, requirements = about["Requires-Python"] or "", about.get_all("Requires-Dist") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
        python, requirements = project["requires-python"], project["dependencies"]
    found = [match.groups() for text in requirements if "extra" not in text and (match := _REQUIREMENT.match(text))]
    return WantedVersions(python, {name: specifier.strip(" ()") for name, specifier in found if name in LIBRARIES})


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version fits, by release numbers and the operators in pyproject.toml alone (PEP 440)."""
    here = _numbers(version)
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            return False
        operator, number, any_after = match.groups()
        there = _numbers(number)
        length = max(len(here), len(there))
        a, b = (numbers + (0,) * (length - len(numbers)) for numbers in (here, there))
        equal = here[: len(there)] == there if any_after else a == b
        if not {"==": equal, ">=": a >= b, "<": a < b}[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Returns `2.13.0` of `2.13.0+cpu` or `2.13.0rc1`."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _compared(name: str, version: str | None, specifier: str, fix: str) -> Finding:
    wanted = specifier or "any version"
    if version is None:
        return Finding(name, Level.FAIL, f"is not installed; {wanted} is wanted", fix)
    if satisfies(version, specifier):
        return Finding(name, Level.OK, f"{version} ({wanted} is wanted)")
    return Finding(name, Level.FAIL, f"{version}, but {wanted} is wanted", fix)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# ---- the compute device (torch is loaded here, which takes seconds) --------------------------------------------------


def look_at_device(wish: str) -> Sequence[Finding]:
    """Checks the devices of a node with `--device WISH`. Raises ConfigError if they are not there."""
    from node.model.device import choose_devices

    return [_device(device, wish) for device in sorted(set(choose_devices(wish).value), key=str)]


def _device(device: torch.device, wish: str) -> Finding:
    import torch

    try:
        flops = matmul_flops(device, CPU_SIZE if device.type == "cpu" else GPU_SIZE)
    except RuntimeError as error:  # torch's, of a driver or of memory
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        fix = "Check the driver, and what else uses the GPU."
        return Finding("device", Level.FAIL, f"{device}: {why}", fix)
    if flops is None:
        fix = "Do not train with it: the hardware or driver is broken."
        return Finding("device", Level.FAIL, f"{device} multiplies wrongly", fix)
    speed = f"a {device.type.upper()} matrix product runs at {flops / 1e9:,.0f} GFLOP/s"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        found = f"{torch.cuda.get_device_name(device)}, {memory}; {speed}"
        if free < LITTLE_GPU_BYTES:
            fix = "Stop what else uses the GPU, or choose another one with --device cuda:N."
            return Finding("device", Level.WARN, found, fix)
        return Finding("device", Level.OK, found)
    if device.type == "cpu" and NVIDIA.exists() and wish == "auto":
        found = f"there is an NVIDIA GPU, but torch {torch.__version__} cannot use it; {speed}"
        fix = "Install a build of torch for CUDA, or check `nvidia-smi`."
        return Finding("device", Level.WARN, found, fix)
    return Finding("device", Level.OK, f"{device}, {torch.get_num_threads()} threads; {speed}")


def matmul_flops(device: torch.device, size: int) -> float | None:
    """Measures the FLOP/s of a float32 product of two [size, size] matrices; None if the result is wrong."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type == "mps":
            torch.mps.synchronize()

    left, right = (torch.ones(size, size, device=device) for _ in range(2))
    product = left @ right  # the first one pays for what is loaded late
    wait()
    began, times = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < MEASURE_S:
        product = left @ right
        wait()
        times += 1
    return 2 * size**3 * times / elapsed if bool((product == size).all()) else None


# ---- memory, and the stages that fit ---------------------------------------------------------------------------------


def look_at_memory(memory: Callable[[], Reasoned[int | None]] = available_memory) -> Sequence[Finding]:
    """Checks the available memory of the machine, or of the container that limits it."""
    available = memory().value
    if available is None:
        return [Finding("memory", Level.SKIP, "this system does not say how much is free")]
    found = f"{available / GIB:.1f} GiB available"
    if available < NO_MEMORY_BYTES:
        fix = "Close other programs, or give the container more memory: a node needs 1 GiB and its stage."
        return [Finding("memory", Level.FAIL, found, fix)]
    if available < LITTLE_MEMORY_BYTES:
        return [Finding("memory", Level.WARN, found, "Enough for small stages; close other programs for larger ones.")]
    return [Finding("memory", Level.OK, found)]


def look_at_room(wish: str, limit: Reasoned[int] | None, moments: MomentType = MomentType.FLOAT32) -> Sequence[Finding]:
    """Says how large a stage a node could take. Raises ConfigError if the device is not there."""
    from node.model.memory_need import parameters_that_fit

    room = _room(wish, limit)
    there = room.memory if room.device is None else room.device
    at_once, in_fragments = (parameters_that_fit(room, moments, fragments) for fragments in (1, MANY_FRAGMENTS))
    if at_once is None or in_fragments is None or there.value is None:
        return [Finding("stage", Level.SKIP, "this system does not say how much memory is free")]
    found = f"room for a stage of at most {_rough(at_once)} million parameters"
    if _rough(in_fragments) != _rough(at_once):
        found += f", {_rough(in_fragments)} in a run with {MANY_FRAGMENTS} fragments"
    return [Finding("stage", Level.OK, f"{found}: {size_text(there.value)} are free {there.reason}")]


def what_fits_of(wish: str, limit: Reasoned[int] | None, moments: MomentType, manifest: Manifest) -> Sequence[Finding]:
    """Says which stages of a run a node could take. Raises ConfigError if the device is not there."""
    from node.model.memory_need import what_fits

    fits = what_fits(manifest, _room(wish, limit), DEFAULT_SLOTS, moments)
    if not fits.value:
        fix = "Close other programs, raise --memory-limit if there is one, or ask for a run with smaller stages."
        return [Finding("fits", Level.FAIL, fits.reason, fix)]
    return [Finding("fits", Level.OK, fits.reason)]


def _rough(parameters: int) -> str:
    return f"{parameters // ROUGH * ROUGH / 1e6:,.1f}"


def _room(wish: str, limit: Reasoned[int] | None) -> Room:
    from node.model.device import choose_devices
    from node.model.memory_need import room_on

    return room_on(choose_devices(wish).value[0]).within(limit)


# ---- disk, open files and ports --------------------------------------------------------------------------------------


def look_at_disk(folders: Iterable[tuple[str, Path]]) -> Sequence[Finding]:
    """Checks whether each named folder may be written to, and the free space where it is or would be."""
    return [_disk(name, folder) for name, folder in folders]


def _disk(name: str, folder: Path) -> Finding:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fix = "Choose another folder, or change its owner."
        return Finding("disk", Level.FAIL, f"{name}: {there} cannot be written to", fix)
    free = shutil.disk_usage(there).free
    found = f"{name}: {free / GIB:.1f} GiB free at {folder}"
    if free < NO_DISK_BYTES:
        return Finding("disk", Level.FAIL, found, "Free some space: a full disk loses checkpoints and logs.")
    if free < LITTLE_DISK_BYTES:
        fix = "Free some space, or choose another folder: checkpoints grow with the stage."
        return Finding("disk", Level.WARN, found, fix)
    return Finding("disk", Level.OK, found)


def look_at_files() -> Sequence[Finding]:
    """Checks how many files and sockets a process may open."""
    try:
        import resource
    except ImportError:
        return [Finding("files", Level.SKIP, "this system has no such limit")]
    return [files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]


def files_finding(limit: int) -> Finding:
    """Judges the limit on open files; a negative one is none."""
    if limit < 0 or limit >= FEW_FILES:
        return Finding("files", Level.OK, "no limit on open files" if limit < 0 else f"{limit} files may be open")
    level = Level.FAIL if limit < TOO_FEW_FILES else Level.WARN
    fix = "Raise it: `ulimit -n 4096`, or LimitNOFILE=4096 in the service."
    return Finding("files", level, f"only {limit} files may be open", fix)


def look_at_port(host: str, port: int) -> Sequence[Finding]:
    """Checks that a port (0: any free one) can be bound at a local address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where = f"port {port}" if port else "any free port"
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # As gRPC binds: connections that have ended a moment ago do not hold the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host.strip("[]"), port))
            listener.listen(1)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "Stop what uses it (a running node?), or choose another port or --listen address."
        return [Finding("port", Level.FAIL, f"cannot listen on {where} of {host}: {why}", fix)]
    return [Finding("port", Level.OK, f"{where} of {host} can be listened on")]
