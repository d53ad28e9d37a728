"""The check that a module fits into this machine, known from the manifest alone: compared before anything of the module
is allocated.

A manifest is a stranger's, and a kernel that runs out of memory kills whomever it likes. What is counted is what a
serving replica surely takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from node.model.free_memory import GIB, available_memory
from node.model.optimizer import optimizer_bytes
from node.model.parts import HIDDEN_TYPES
from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ResourceExhausted
from swarm.vocabulary.types import ModuleId, Reasoned

_SUM_BYTES: Final = 8
"""Of each parameter's gradients, in float64 (`node.model.optimizer.Accumulator`)."""
_GRADIENT_BYTES: Final = 4
"""Of one visit, or their mean before a step; never both (`node.model.passes`, `InnerOptimizer.step`)."""
_ANCHOR_BYTES: Final = 2 * 4
"""Parameters and outer momentum (`node.averaging.anchor.anchor`)."""
_SNAPSHOT_BYTES: Final = 4
"""What a round's pseudo-gradient is taken from (`node.averaging.replica_sync`)."""
DEVICE_BYTES: Final = BYTES_PER_PARAMETER + _SUM_BYTES + _GRADIENT_BYTES
"""Of each parameter, on the compute device; besides what the inner optimizer has of it."""
MEMORY_BYTES: Final = 2 * _ANCHOR_BYTES + _SNAPSHOT_BYTES
"""Of each parameter, in the machine's memory, during a round: the anchor that holds and the one in the making. Older
ones are kept only where there is room (`node.averaging.anchor.anchor_store`)."""
TENSORS_HELD: Final = 3
"""Of each microbatch that is held: input, output, gradient (`node.pipeline.microbatch_runner`)."""
_HIDDEN_KEPT: Final = 4
_FEED_FORWARD_KEPT: Final = 3
"""Rows of these widths that one block's graph surely keeps of each token: attention's inputs and output, and the gated
product with its two factors."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that is needed in bytes, with the reasons."""

    device: int
    memory: int
    reason: str

    @property
    def all(self) -> int:
        return self.device + self.memory


@dataclass(frozen=True, slots=True)
class Room:
    """The free memory in bytes, with what says so; None where nobody can tell. `device` is None where the machine's
    memory is the compute device's.
    """

    memory: Reasoned[int | None]
    device: Reasoned[int | None] | None

    def lacks(self, need: Need) -> str | None:
        """The memory that there is too little of, as a sentence's end; None when the need can be met."""
        if self.device is None:
            return _lack(need.all, self.memory)
        return _lack(need.device, self.device) or _lack(need.memory, self.memory)

    def and_back(self, need: Need) -> Room:
        """The room when what is held for this need has been let go of."""
        device = self.device
        if device is None:
            return Room(_more(self.memory, need.all), None)
        return Room(_more(self.memory, need.memory), _more(device, need.device))


def need_of(manifest: Manifest, modules: Iterable[ModuleId], microbatches: int) -> Need:
    """The memory that a replica of each of the modules takes, with so many microbatches held at a time."""
    model, blocks = manifest.model, manifest.stages.blocks
    stages = [module.stage for module in modules]
    shapes = [parameter_shapes(manifest, ModuleId(stage)) for stage in stages]
    elements = sum(parameter_bytes(each) for each in shapes) // BYTES_PER_PARAMETER
    of_optimizer = sum(
        optimizer_bytes(manifest.training.inner, name, shape) for each in shapes for name, shape in each.items()
    )
    width = HIDDEN_TYPES[model.dtype].itemsize
    visit = manifest.microbatch_tokens * (_HIDDEN_KEPT * model.hidden + _FEED_FORWARD_KEPT * model.feed_forward) * width
    graph = max(blocks[stage] for stage in stages) * visit
    held = TENSORS_HELD * microbatches * math.prod(manifest.hidden_shape) * width
    state = elements * DEVICE_BYTES + of_optimizer
    device, memory = state + graph, elements * MEMORY_BYTES + held
    said = (
        f"{_size(state + elements * MEMORY_BYTES)} for {elements} parameters with their gradients, "
        f"anchors and {manifest.training.inner.name}'s state,"
        f" {_size(graph)} for computing one microbatch, {_size(held)} for holding {microbatches}"
    )
    return Need(device, memory, said)


def require_room(manifest: Manifest, modules: Sequence[ModuleId], device: torch.device, microbatches: int) -> None:
    """Checks that there is room before a replica of these modules is made.

    Raises:
        ResourceExhausted: says what it takes, what there is, and what can be done.
    """
    need = need_of(manifest, modules, microbatches)
    lack = room_on(device).lacks(need)
    if lack is not None:
        what = f"module {modules[0]}" if len(modules) == 1 else f"a model of {len(modules)} modules"
        raise _too_little(what, need, lack)


def modules_that_fit(
    manifest: Manifest, modules: Sequence[ModuleId], room: Room, microbatches: int
) -> Iterator[ModuleId]:
    """The modules that there is room for. All of a stage are alike."""
    fits: dict[int, bool] = {}
    for module in modules:
        if module.stage not in fits:
            fits[module.stage] = room.lacks(need_of(manifest, (module,), microbatches)) is None
        if fits[module.stage]:
            yield module


def none_fits(manifest: Manifest, modules: Sequence[ModuleId], room: Room, microbatches: int) -> ResourceExhausted:
    """The error for when no module fits: tells of the smallest."""
    firsts = {module.stage: module for module in reversed(modules)}.values()
    need, module = min(((need_of(manifest, (m,), microbatches), m) for m in firsts), key=lambda pair: pair[0].all)
    lack = room.lacks(need)
    assert lack is not None, "asked only when nothing fits"
    return _too_little(f"no module of this run fits into this machine; the smallest, {module},", need, lack)


def room_on(device: torch.device) -> Room:
    """The free memory for a device now."""
    memory = available_memory()
    if device.type == "cuda":
        return Room(memory, Reasoned(torch.cuda.mem_get_info(device)[0], "on the GPU"))
    if device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return Room(memory, Reasoned(free, "for Apple's GPU"))
    return Room(memory, None)


def _lack(wanted: int, there: Reasoned[int | None]) -> str | None:
    if there.value is None or wanted <= there.value:
        return None
    return f"{_size(there.value)} are free {there.reason}"


def _more(there: Reasoned[int | None], back: int) -> Reasoned[int | None]:
    return there if there.value is None else Reasoned(there.value + back, there.reason)


def _too_little(what: str, need: Need, lack: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"{what} takes {_size(need.all)} ({need.reason}), and {lack}",
        hint=(
            "Close other programs, raise the limit, hold fewer microbatches (--slots, --window), or join a "
            "run with smaller stages."
        ),
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB // 10 else f"{size_bytes / 2**20:.1f} MiB"
