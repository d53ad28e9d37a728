"""The check that a module fits into this machine, before anything of it is allocated. It counts lower bounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from node.model.free_memory import available_memory
from node.model.moments import MomentType
from node.model.optimizer import optimizer_bytes
from node.model.optimizers.adamw import AdamW, EightBitAdamW
from node.model.parts import HIDDEN_TYPES
from node.model.shapes import BYTES_PER_PARAMETER, Shape, parameter_bytes, parameter_shapes
from protocol.manifest.manifest import Manifest
from swarm.membership.placement import modules_that_fit
from swarm.membership.room import Need, Needs, Room, size_text
from swarm.vocabulary.errors import OutOfMemory
from swarm.vocabulary.types import ModuleId, Reasoned

_SUM_BYTES: Final = 4
_CPU_SUM_BYTES: Final = 8
_GRADIENT_BYTES: Final = 4
"""Gradients of one visit, or their mean before a step; never both."""
_ANCHOR_BYTES: Final = 2 * 4
"""Parameters and outer momentum (`node.averaging.anchor`)."""
_SNAPSHOT_BYTES: Final = 4
"""The snapshot from which a round's pseudo-gradient is taken (`node.averaging.replica_sync`)."""
DEVICE_BYTES: Final = BYTES_PER_PARAMETER + _SUM_BYTES
"""Bytes of each block parameter on a card, besides the inner optimizer's."""
CPU_BYTES: Final = BYTES_PER_PARAMETER + _CPU_SUM_BYTES + _GRADIENT_BYTES
"""The same where the CPU is the compute device."""
TENSORS_HELD: Final = 3
"""Tensors of each microbatch held: input, output, gradient."""
_HIDDEN_KEPT: Final = 4
_FEED_FORWARD_KEPT: Final = 3
"""Rows of each token that a block's graph keeps, in feed-forward widths: the product and its two factors."""

_MANY: Final = 2**20
_NAMED: Final = 8


def round_bytes(fragments: int) -> float:
    """Memory of each parameter for rounds, in bytes: the anchor, and a fragment's new anchor and snapshot."""
    return _ANCHOR_BYTES + (_ANCHOR_BYTES + _SNAPSHOT_BYTES) / fragments


def need_of(
    manifest: Manifest, modules: Iterable[ModuleId], microbatches: int, moments: MomentType = MomentType.FLOAT32
) -> Need:
    """The memory that a replica of each of the modules takes, with so many microbatches held at a time."""
    blocks = manifest.stages.blocks
    stages = [module.stage for module in modules]
    return _Measure(manifest, moments).need([blocks[stage] for stage in stages], microbatches, ends=stages.count(0))


def needs_of(manifest: Manifest, microbatches: int, moments: MomentType = MomentType.FLOAT32) -> Needs:
    """The memory that a replica of each module of the run takes. All of a stage are alike."""
    measure = _Measure(manifest, moments)
    each = [
        measure.need([blocks], microbatches, ends=int(stage == 0))
        for stage, blocks in enumerate(manifest.stages.blocks)
    ]
    return {module: each[module.stage] for module in manifest.modules()}


def require_room(
    manifest: Manifest,
    modules: Sequence[ModuleId],
    device: torch.device,
    microbatches: int,
    moments: MomentType = MomentType.FLOAT32,
) -> None:
    """Raises OutOfMemory if there is no memory for replicas of these modules."""
    need = need_of(manifest, modules, microbatches, moments)
    lack = room_on(device).lacks(need)
    if lack is not None:
        what = f"module {modules[0]}" if len(modules) == 1 else f"a model of {len(modules)} modules"
        raise _too_little(what, need, lack)


def none_fits(
    manifest: Manifest,
    modules: Sequence[ModuleId],
    room: Room,
    microbatches: int,
    moments: MomentType = MomentType.FLOAT32,
) -> OutOfMemory:
    """The error for when none of these modules fits: tells of the smallest, and of what would fit."""
    needs = needs_of(manifest, microbatches, moments)
    module = min(modules, key=lambda each: needs[each].all)
    lack = room.lacks(needs[module])
    assert lack is not None, "asked only when nothing fits"
    what = f"module {module}"
    if len(modules) > 1:
        what = f"no module of this run fits into this machine; the smallest, {module},"
    return _too_little(what, needs[module], f"{lack}{_instead(manifest, room, microbatches, moments)}")


def blocks_that_fit(manifest: Manifest, room: Room, microbatches: int, moments: MomentType = MomentType.FLOAT32) -> int:
    """The most blocks that a stage after stage 0 may have here; all of the model if free memory is unknown."""
    most = sum(manifest.stages.blocks)

    measure = _Measure(manifest, moments)

    def fits(blocks: int) -> bool:
        return room.lacks(measure.need([blocks], microbatches, ends=0)) is None

    return bisect_left(range(1, most + 1), True, key=lambda blocks: not fits(blocks))


def parameters_that_fit(room: Room, moments: MomentType = MomentType.FLOAT32, fragments: int = 1) -> int | None:
    """The block parameters that fit with AdamW, without activations. None if free memory is unknown."""
    kept = (EightBitAdamW if moments is MomentType.EIGHT_BIT else AdamW).state_bytes((_MANY,)) / _MANY
    device, memory = DEVICE_BYTES + kept, round_bytes(fragments)
    if room.device is None:
        return None if room.memory.value is None else int(room.memory.value / (CPU_BYTES + kept + memory))
    known = [int(there / each) for there, each in ((room.device.value, device), (room.memory.value, memory)) if there]
    return min(known, default=None)


def what_fits(
    manifest: Manifest, room: Room, microbatches: int, moments: MomentType = MomentType.FLOAT32
) -> Reasoned[tuple[int, ...]]:
    """The stages of the run for which there is room, with a clause for people."""
    needs = needs_of(manifest, microbatches, moments)
    sizes = {stage: needs[ModuleId(stage)] for stage in range(manifest.stages.count)}
    fitting = tuple(stage for stage, need in sizes.items() if room.lacks(need) is None)
    large = [stage for stage in sizes if stage not in fitting]
    largest = max(sizes, key=lambda stage: sizes[stage].all)
    there = room.memory if room.device is None else room.device
    free = "" if there.value is None else f", and {size_text(there.value)} are free {there.reason}"
    if not large:
        return Reasoned(
            fitting, f"every stage fits; the largest, {largest}, takes {size_text(sizes[largest].all)}{free}"
        )
    smallest = min(large, key=lambda stage: sizes[stage].all)
    lack = room.lacks(sizes[smallest])
    takes = f"{smallest} takes {size_text(sizes[smallest].all)}, and {lack}"
    if fitting:
        return Reasoned(fitting, f"there is room for {_listed(fitting)}; of the others stage {takes}")
    instead = _instead(manifest, room, microbatches, moments)
    return Reasoned(fitting, f"no stage fits; the smallest, {takes}{instead}")


def room_on(device: torch.device) -> Room:
    memory = available_memory()
    if device.type == "cuda":
        return Room(memory, Reasoned(torch.cuda.mem_get_info(device)[0], "on the GPU"))
    if device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return Room(memory, Reasoned(free, "for Apple's GPU"))
    return Room(memory, None)


class _Measure:
    """The sizes of one block and of both ends of stage 0. Counted once: a manifest may have a million blocks."""

    def __init__(self, manifest: Manifest, moments: MomentType) -> None:
        self._manifest, self._moments = manifest, moments
        stages = manifest.stages.model_copy(update={"blocks": (0, 1), "experts": 1, "per_path": None})
        cut = manifest.model_construct(**{**dict(manifest), "stages": stages})
        self._ends, self._block = (self._counted(parameter_shapes(cut, ModuleId(stage))) for stage in (0, 1))

    def _counted(self, shapes: Mapping[str, Shape]) -> tuple[int, int]:
        """The parameters, and the bytes that the inner optimizer has of them."""
        inner = self._manifest.training.inner
        kept = sum(optimizer_bytes(inner, name, shape, self._moments) for name, shape in shapes.items())
        return parameter_bytes(shapes) // BYTES_PER_PARAMETER, kept

    def need(self, blocks: Sequence[int], microbatches: int, *, ends: int) -> Need:
        """Of stages with so many blocks, of which so many (0 or 1) have the model's ends."""
        manifest, model = self._manifest, self._manifest.model
        elements, of_optimizer = (sum(blocks) * b + ends * e for b, e in zip(self._block, self._ends, strict=True))
        width = HIDDEN_TYPES[model.dtype].itemsize
        kept = _HIDDEN_KEPT * model.hidden + _FEED_FORWARD_KEPT * model.feed_forward
        graph = max(blocks) * manifest.microbatch_tokens * kept * width
        held = TENSORS_HELD * microbatches * math.prod(manifest.hidden_shape) * width
        of_each = DEVICE_BYTES
        if ends:
            of_each += _GRADIENT_BYTES + (width if width < BYTES_PER_PARAMETER else 0)
        state, on_cpu = elements * of_each + of_optimizer, elements * CPU_BYTES + of_optimizer
        rounds = int(elements * round_bytes(manifest.training.fragments))
        memory = rounds + held
        said = (
            f"{size_text(on_cpu + rounds)} for {elements} parameters with their gradients, "
            f"anchors and {manifest.training.inner.name}'s state (of it on a card {size_text(state)}),"
            f" {size_text(graph)} for computing one microbatch, {size_text(held)} for holding {microbatches}"
        )
        return Need(state + graph, memory, said, on_cpu - state)


def _listed(stages: Sequence[int]) -> str:
    named = ", ".join(map(str, stages[:_NAMED]))
    what = "stage" if len(stages) == 1 else "stages"
    return f"{what} {named}{f' and {len(stages) - _NAMED} others' if len(stages) > _NAMED else ''}"


def _instead(manifest: Manifest, room: Room, microbatches: int, moments: MomentType) -> str:
    fitting = modules_that_fit(manifest.modules(), room, needs_of(manifest, microbatches, moments))
    if fitting:
        named = ", ".join(map(str, fitting[:_NAMED]))
        return f"; there is room for {named}{' and others' if len(fitting) > _NAMED else ''}"
    blocks = blocks_that_fit(manifest, room, microbatches, moments)
    if blocks == 0:
        return ", too little for a stage of one block of this model"
    return f", enough for a stage of {blocks} block{'s' if blocks > 1 else ''} of this model"


def _too_little(what: str, need: Need, lack: str) -> OutOfMemory:
    return OutOfMemory(
        f"{what} takes {size_text(need.all)} ({need.reason}), and {lack}",
        hint=(
            "Close other programs, raise --memory-limit if there is one, hold fewer microbatches (--slots, --window), "
            "or join a run with smaller stages (skipstone new --card). --moments 8bit takes 6 bytes a parameter less."
        ),
    )
