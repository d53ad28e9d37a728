"""Memory and cores that this process can use, limited by machine, container and process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from swarm.vocabulary.types import Reasoned

GIB: Final = 2**30

_MEMINFO: Final = Path("/proc/meminfo")
_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")


def available_memory(
    meminfo: Path = _MEMINFO, control_groups: Path = _CONTROL_GROUPS, own_groups: Path = _OWN_GROUPS
) -> Reasoned[int | None]:
    """Returns the bytes this process can still allocate and the limit that decides. None if unknown."""
    found = [_of_machine(meminfo), *_of_control_groups(control_groups, own_groups), _of_address_space()]
    known = [(value, reason) for value, reason in found if value is not None]
    if not known:
        return Reasoned(None, "this system does not report free memory")
    return Reasoned(*min(known))


def _of_machine(meminfo: Path) -> tuple[int | None, str]:
    """Reads the machine's free memory from Linux's /proc/meminfo, elsewhere from POSIX sysconf."""
    said = "in this machine"
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024, said
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), said
        except (ValueError, OSError, AttributeError):
            return None, said


def _of_control_groups(root: Path, own: Path) -> Iterator[tuple[int | None, str]]:
    """Yields the memory left in each control group of this process."""
    for group in _groups("memory", root, own):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            yield _left(group, limit, used), "under the container's limit"


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yields the folders that this process's control groups and their parents may have."""
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
        # Version 2 of control groups lists no controllers.
        paths = {path.strip("/") for _, names, path in groups if not names or controller in names.split(",")}
    except (OSError, ValueError):
        paths = set()
    for path in {".", *paths}:  # inside a container the own group appears as the root
        for group in (Path(path), *Path(path).parents):  # a parent group may have a lower limit
            yield root / group
            yield root / controller / group  # version 1


def _left(group: Path, limit: str, used: str) -> int | None:
    """Returns the bytes left in a control group. None if the group has no limit."""
    try:
        left = int((group / limit).read_text()) - int((group / used).read_text())
    except (OSError, ValueError):
        return None
    try:
        # Inactive file cache can be reclaimed, so it does not count as used.
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left += int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))
    except (OSError, ValueError):
        pass
    return max(0, left)


def _of_address_space() -> tuple[int | None, str]:
    """Returns the bytes that this process may still allocate under `ulimit -v`."""
    said = "under this process's address space limit"
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit == resource.RLIM_INFINITY:
            return None, said
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (ImportError, OSError, ValueError):
        return None, said
    return max(0, limit - taken), said


def usable_cores(control_groups: Path = _CONTROL_GROUPS, own_groups: Path = _OWN_GROUPS) -> int:
    """Returns the cores that this process may use at once, at least 1: a container's quota counts as whole cores."""
    # With more threads than the quota has cores, all stop for the rest of each period.
    found = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for group in _groups("cpu", control_groups, own_groups):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
                found.append(quota / period)
            except (OSError, ValueError, ZeroDivisionError):  # no such file, or no quota
                continue
    return max(1, int(min(cores for cores in found if cores > 0)))
