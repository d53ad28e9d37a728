"""Estimates of the memory that modules need, checked before memory is allocated. All are lower bounds."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from node.model.machine_limits import available_memory
from node.model.moments import DEFAULT_SLOTS, MomentType
from node.model.optimizer import optimizer_bytes
from node.model.optimizers.adamw import AdamW, EightBitAdamW
from node.model.residual import HIDDEN_TYPES, TABLE_BYTES
from node.model.shapes import BYTES_PER_PARAMETER, Shape, parameter_bytes, parameter_shapes
from protocol.manifest.manifest import Manifest
from swarm.membership.memory_fit import FreeMemory, Need, Needs, size_text
from swarm.membership.placement import modules_that_fit
from swarm.pipeline.custody import RECEIVED_PER_SLOT
from swarm.vocabulary.errors import OutOfMemory
from swarm.vocabulary.types import ModuleId, Reasoned

_SUM_BYTES: Final = 4
_CPU_SUM_BYTES: Final = 8
_GRADIENT_BYTES: Final = 4  # Per parameter: gradients of one visit, or the mean gradient before a step; never both
_ANCHOR_BYTES: Final = 2 * 4  # Bytes per parameter for an anchor: parameters and outer momentum
_SNAPSHOT_BYTES: Final = 4  # Bytes per parameter for the copy that a round's pseudo-gradient is taken from
DEVICE_BYTES: Final = BYTES_PER_PARAMETER + _SUM_BYTES  # Bytes per block parameter on a GPU, without optimizer state
CPU_BYTES: Final = BYTES_PER_PARAMETER + _CPU_SUM_BYTES + _GRADIENT_BYTES  # The same if the CPU computes
_HIDDEN_KEPT: Final = 4
_FEED_FORWARD_KEPT: Final = 3  # Activations per token in a block's graph, in feed-forward widths: product, two factors

PLAIN: Final = MomentType.FLOAT32
LITTLE_BYTES, MOST_SLOTS = 2**26, 64
_MANY: Final = 2**20
_NAMED: Final = 8


def slots_for(manifest: Manifest, asked: int | None) -> int:
    """Returns how many microbatches a data node holds: 16 unless asked, and up to 64 where they take little memory."""
    each = RECEIVED_PER_SLOT * math.prod(manifest.hidden_shape) * HIDDEN_TYPES[manifest.model.dtype].itemsize
    return asked or max(DEFAULT_SLOTS, min(MOST_SLOTS, LITTLE_BYTES // each))


def round_bytes(fragments: int) -> float:
    """Returns the bytes per parameter for averaging: the anchor, and one fragment's new anchor and snapshot."""
    return _ANCHOR_BYTES + (_ANCHOR_BYTES + _SNAPSHOT_BYTES) / fragments


def need_of(manifest: Manifest, modules: Iterable[ModuleId], microbatches: int, moments: MomentType = PLAIN) -> Need:
    """Returns the memory to train a replica of each of these modules with `microbatches` in flight."""
    blocks = manifest.stages.blocks
    stages = [module.stage for module in modules]
    return _Measure(manifest, moments).need([blocks[stage] for stage in stages], microbatches, ends=stages.count(0))


def needs_of(manifest: Manifest, microbatches: int, moments: MomentType = PLAIN) -> Needs:
    """Returns the memory to train each module of the run with `microbatches` in flight."""
    measure = _Measure(manifest, moments)
    each = [measure.need([blocks], microbatches, ends=int(at == 0)) for at, blocks in enumerate(manifest.stages.blocks)]
    return {module: each[module.stage] for module in manifest.modules()}


def require_memory(
    manifest: Manifest, modules: Sequence[ModuleId], device: torch.device, microbatches: int, moments: MomentType
) -> None:
    """Raises OutOfMemory if replicas of all these modules do not fit in the free memory together."""
    need = need_of(manifest, modules, microbatches, moments)
    lack = free_memory_on(device).lacks(need)
    if lack is not None:
        what = f"module {modules[0]}" if len(modules) == 1 else f"a model of {len(modules)} modules"
        raise _too_little(what, need, lack)


def none_fits(
    manifest: Manifest, modules: Sequence[ModuleId], free: FreeMemory, microbatches: int, moments: MomentType = PLAIN
) -> OutOfMemory:
    """Returns the error if no module fits. The error names the smallest one of them, and modules that would fit."""
    needs = needs_of(manifest, microbatches, moments)
    module = min(modules, key=lambda each: needs[each].all)
    lack = free.lacks(needs[module])
    assert lack is not None, "called only if nothing fits"
    what = f"module {module}"
    if len(modules) > 1:
        what = f"no module of this run fits on this machine; the smallest, {module},"
    return _too_little(what, needs[module], f"{lack}{_instead(manifest, free, microbatches, moments)}")


def blocks_that_fit(manifest: Manifest, free: FreeMemory, microbatches: int, moments: MomentType = PLAIN) -> int:
    """Returns the most blocks with which a stage after stage 0 fits; all blocks if free memory is unknown."""
    most = sum(manifest.stages.blocks)

    measure = _Measure(manifest, moments)

    def fits(blocks: int) -> bool:
        return free.lacks(measure.need([blocks], microbatches, ends=0)) is None

    return bisect_left(range(1, most + 1), True, key=lambda blocks: not fits(blocks))  # memory grows with blocks


def parameters_that_fit(free: FreeMemory, moments: MomentType = PLAIN, fragments: int = 1) -> int | None:
    """Returns how many block parameters fit in free memory with AdamW, without activations. None if unknown."""
    kept = (EightBitAdamW if moments is MomentType.EIGHT_BIT else AdamW).state_bytes((_MANY,)) / _MANY
    device, memory = DEVICE_BYTES + kept, round_bytes(fragments)
    if free.device is None:
        return None if free.memory.value is None else int(free.memory.value / (CPU_BYTES + kept + memory))
    known = [int(there / each) for there, each in ((free.device.value, device), (free.memory.value, memory)) if there]
    return min(known, default=None)


def what_fits(
    manifest: Manifest, free: FreeMemory, microbatches: int, moments: MomentType = PLAIN
) -> Reasoned[tuple[int, ...]]:
    """Returns the stages of the run that fit in free memory, with an explanation for the user."""
    needs = needs_of(manifest, microbatches, moments)
    sizes = {stage: needs[ModuleId(stage)] for stage in range(manifest.stages.count)}
    fitting = tuple(stage for stage, need in sizes.items() if free.lacks(need) is None)
    large = [stage for stage in sizes if stage not in fitting]
    largest = max(sizes, key=lambda stage: sizes[stage].all)
    there = free.memory if free.device is None else free.device
    more = "" if there.value is None else f", and {size_text(there.value)} are free {there.reason}"
    if not large:
        return Reasoned(fitting, f"all stages fit; the largest, {largest}, takes {size_text(sizes[largest].all)}{more}")
    smallest = min(large, key=lambda stage: sizes[stage].all)
    takes = f"{smallest} takes {size_text(sizes[smallest].all)}, and {free.lacks(sizes[smallest])}"
    if fitting:
        return Reasoned(fitting, f"there is room for {_listed(fitting)}; of the others stage {takes}")
    instead = _instead(manifest, free, microbatches, moments)
    return Reasoned(fitting, f"no stage fits; the smallest, {takes}{instead}")


def free_memory_on(device: torch.device) -> FreeMemory:
    memory = available_memory()
    if device.type == "cuda":
        return FreeMemory(memory, Reasoned(torch.cuda.mem_get_info(device)[0], "on the GPU"))
    if device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return FreeMemory(memory, Reasoned(free, "for Apple's GPU"))
    return FreeMemory(memory, None)


class _Measure:
    """Calculator of memory needs, from the sizes of one block and of stage 0's embedding and head."""

    def __init__(self, manifest: Manifest, moments: MomentType) -> None:
        self._manifest, self._moments = manifest, moments
        # Measure a model of one block: a manifest may have a million.
        stages = manifest.stages.model_copy(update={"blocks": (0, 1), "experts": 1, "per_path": None})
        cut = manifest.model_construct(**{**dict(manifest), "stages": stages})
        self._ends, self._block = (self._counted(parameter_shapes(cut, ModuleId(stage))) for stage in (0, 1))

    def _counted(self, shapes: Mapping[str, Shape]) -> tuple[int, int]:
        """Returns the number of parameters with these shapes, and the bytes of their optimizer state."""
        training = self._manifest.training
        kept = sum(optimizer_bytes(training, name, shape, self._moments) for name, shape in shapes.items())
        return parameter_bytes(shapes) // BYTES_PER_PARAMETER, kept

    def need(self, blocks: Sequence[int], microbatches: int, *, ends: int) -> Need:
        """Returns the memory of stages with these block counts; `ends` (0 or 1): how many have embedding and head."""
        manifest, model = self._manifest, self._manifest.model
        elements, of_optimizer = (sum(blocks) * b + ends * e for b, e in zip(self._block, self._ends, strict=True))
        width = HIDDEN_TYPES[model.dtype].itemsize
        kept = _HIDDEN_KEPT * model.hidden + _FEED_FORWARD_KEPT * model.feed_forward
        # Blocks are computed one stage at a time, so only the largest graph counts.
        graph = max(blocks) * manifest.microbatch_tokens * kept * width
        if model.residual:  # the fixed rows of all tokens, or of the microbatch's
            rows = min(model.vocabulary, max(manifest.microbatch_tokens, TABLE_BYTES // (model.hidden * width)))
            graph += rows * model.hidden * width
        held = RECEIVED_PER_SLOT * microbatches * math.prod(manifest.hidden_shape) * width
        of_each = DEVICE_BYTES
        if ends:  # stage 0 holds gradients apart from the sums, and narrow copies of its weights for bfloat16 products
            of_each += _GRADIENT_BYTES + (width if width < BYTES_PER_PARAMETER else 0)
        state, on_cpu = elements * of_each + of_optimizer, elements * CPU_BYTES + of_optimizer
        rounds = int(elements * round_bytes(manifest.training.fragments))
        memory = rounds + held
        said = (
            f"{size_text(on_cpu + rounds)} for {elements} parameters with gradients, "
            f"anchors and {manifest.training.inner.name} state ({size_text(state)} of it on a GPU),"
            f" {size_text(graph)} to compute one microbatch, {size_text(held)} to keep {microbatches} in flight"
        )
        return Need(state + graph, memory, said, on_cpu - state)


def _listed(stages: Sequence[int]) -> str:
    named = ", ".join(map(str, stages[:_NAMED]))
    what = "stage" if len(stages) == 1 else "stages"
    return f"{what} {named}{f' and {len(stages) - _NAMED} others' if len(stages) > _NAMED else ''}"


def _instead(manifest: Manifest, free: FreeMemory, microbatches: int, moments: MomentType) -> str:
    fitting = modules_that_fit(manifest.modules(), free, needs_of(manifest, microbatches, moments))
    if fitting:
        named = ", ".join(map(str, fitting[:_NAMED]))
        return f"; there is room for {named}{' and others' if len(fitting) > _NAMED else ''}"
    blocks = blocks_that_fit(manifest, free, microbatches, moments)
    if blocks == 0:
        return ", too little for a stage of one block of this model"
    return f", enough for a stage of {blocks} block{'s' if blocks > 1 else ''} of this model"


def _too_little(what: str, need: Need, lack: str) -> OutOfMemory:
    return OutOfMemory(
        f"{what} takes {size_text(need.all)} ({need.reason}), and {lack}",
        hint=(
            "Close other programs, raise --memory-limit, use --moments 8bit (6 bytes per parameter less) or fewer "
            "microbatches (--slots, --window). Otherwise join a run with smaller stages (`skipstone new --card`)."
        ),
    )
