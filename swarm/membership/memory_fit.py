"""Compares the free memory of a peer with the memory that a module needs (`node.model.memory_need`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, Reasoned

GIB: Final = 2**30
STEP_BYTES: Final = 2**26  # Granularity of announced memory, for privacy


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that a module needs, in bytes, with the reason."""

    device: int  # On a compute device with its own memory
    memory: int  # In the machine's memory in addition
    reason: str
    more_on_cpu: int = 0  # In addition on the CPU, which accumulates in a wider type

    @property
    def all(self) -> int:
        """Returns the memory needed if the compute device uses the machine's memory."""
        return self.device + self.memory + self.more_on_cpu


Needs = Mapping[ModuleId, Need]
_Free = Reasoned[int | None]


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """A peer's free memory in bytes with the source; None if unknown. `device`: None if the device uses `memory`."""

    memory: Reasoned[int | None]
    device: Reasoned[int | None] | None

    def lacks(self, need: Need) -> str | None:
        """Checks whether a module's need fits. Returns None, or the free memory as the end of an error message."""
        if self.device is None:
            return _lack(need.all, self.memory)
        return _lack(need.device, self.device) or _lack(need.memory, self.memory)

    def and_back(self, need: Need) -> "FreeMemory":
        """Returns the free memory after a module that needs `need` is unloaded."""
        return self._changed(need, lambda there, back: there + back)

    def beside(self, need: Need) -> "FreeMemory":
        """Returns the free memory after a module that needs `need` is loaded."""
        return self._changed(need, lambda there, taken: max(0, there - taken))

    def within(self, limit: Reasoned[int] | None) -> "FreeMemory":
        """Returns the free memory with the compute device's part capped at a limit, if any."""
        if limit is None:
            return self
        if self.device is None:
            return FreeMemory(_lesser(self.memory, limit), None)
        return FreeMemory(self.memory, _lesser(self.device, limit))

    def reaching(self, need: Need) -> "FreeMemory":
        """Returns the free memory, raised to `need` if less, so that other peers see that the module fits."""
        return self._changed(need, lambda there, wanted: max(there, -(-wanted // STEP_BYTES) * STEP_BYTES))

    def _changed(self, need: Need, change: Callable[[int, int], int]) -> "FreeMemory":
        def changed(there: _Free, size: int) -> _Free:
            return there if there.value is None else Reasoned(change(there.value, size), there.reason)

        if self.device is None:
            return FreeMemory(changed(self.memory, need.all), None)
        return FreeMemory(changed(self.memory, need.memory), changed(self.device, need.device))

    @property
    def announced(self) -> tuple[int, int]:
        """Returns the free memory to announce, in steps of STEP_BYTES: (machine, device); 0 if unknown or shared."""
        return _steps(self.memory), 0 if self.device is None else _steps(self.device)


def free_memory_of(announcement: Announcement) -> FreeMemory:
    said = "according to its announcement"
    device = announcement.device_bytes
    memory = Reasoned(announcement.memory_bytes or None, said)
    return FreeMemory(memory, Reasoned(device, said) if device else None)


def size_text(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB // 10 else f"{size_bytes / 2**20:.1f} MiB"


def _steps(there: _Free) -> int:
    return 0 if there.value is None else max(1, there.value // STEP_BYTES) * STEP_BYTES


def _lack(wanted: int, there: _Free) -> str | None:
    if there.value is None or wanted <= there.value:
        return None
    return f"{size_text(there.value)} are free {there.reason}"


def _lesser(there: _Free, limit: Reasoned[int]) -> _Free:
    return there if there.value is not None and there.value <= limit.value else Reasoned(limit.value, limit.reason)
