"""The machine: memory, disk, and how many files it lets a process open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from node.doctor.finding import Finding, Level

GIB: Final = 2**30
LITTLE_MEMORY_BYTES: Final = 4 * GIB
NO_MEMORY_BYTES: Final = 1 * GIB
"""Torch, gRPC and the DHT's process alone take more than half of that."""
LITTLE_DISK_BYTES: Final = 5 * GIB
NO_DISK_BYTES: Final = 1 * GIB
FEW_FILES: Final = 1024
"""256 links and the DHT's connections, twice over."""
TOO_FEW_FILES: Final = 256

_MEMORY: Final = Path("/proc/meminfo")
_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")


def look_at_memory(meminfo: Path = _MEMORY, control_group: Path = _CONTROL_GROUP) -> Sequence[Finding]:
    """What is available: to the machine, or to the container that limits it."""
    available = available_memory(meminfo, control_group)
    if available is None:
        return [Finding("memory", Level.SKIP, "this system does not say how much is free")]
    found = f"{available / GIB:.1f} GiB available"
    if available < NO_MEMORY_BYTES:
        return [
            Finding(
                "memory",
                Level.FAIL,
                found,
                "Close other programs, or give the container more memory: a node needs 1 GiB and its stage.",
            )
        ]
    if available < LITTLE_MEMORY_BYTES:
        return [Finding("memory", Level.WARN, found, "Enough for small stages; close other programs for larger ones.")]
    return [Finding("memory", Level.OK, found)]


def available_memory(meminfo: Path, control_group: Path) -> int | None:
    """Bytes, by Linux's files; elsewhere what POSIX says is free, or None."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        machine = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return None
    try:
        limit = int((control_group / "memory.max").read_text())
        used = int((control_group / "memory.current").read_text())
    except (OSError, ValueError):  # there is no limit, or no such file
        return machine
    return min(machine, max(0, limit - used))


def look_at_disk(folders: Iterable[tuple[str, Path]]) -> Sequence[Finding]:
    """Of each named folder: what is free where it is or would be made, and whether it may be written to."""
    return [_disk(name, folder) for name, folder in folders]


def _disk(name: str, folder: Path) -> Finding:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            "disk", Level.FAIL, f"{name}: {there} cannot be written to", "Choose another folder, or change its owner."
        )
    free = shutil.disk_usage(there).free
    found = f"{name}: {free / GIB:.1f} GiB free at {folder}"
    if free < NO_DISK_BYTES:
        return Finding("disk", Level.FAIL, found, "Free some space: a full disk loses checkpoints and logs.")
    if free < LITTLE_DISK_BYTES:
        return Finding(
            "disk", Level.WARN, found, "Free some space, or choose another folder: checkpoints grow with the stage."
        )
    return Finding("disk", Level.OK, found)


def look_at_files() -> Sequence[Finding]:
    """How many files and sockets a process may have open."""
    try:
        import resource
    except ImportError:
        return [Finding("files", Level.SKIP, "this system has no such limit")]
    return [files_finding(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]


def files_finding(limit: int) -> Finding:
    """`limit` is negative where there is none."""
    if limit < 0 or limit >= FEW_FILES:
        return Finding("files", Level.OK, "no limit on open files" if limit < 0 else f"{limit} files may be open")
    level = Level.FAIL if limit < TOO_FEW_FILES else Level.WARN
    return Finding(
        "files",
        level,
        f"only {limit} files may be open",
        "Raise it: `ulimit -n 4096`, or LimitNOFILE=4096 in the service.",
    )
