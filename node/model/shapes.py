"""The names and shapes of a module's parameters, from the manifest alone: what a file claims is compared before memory
is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from protocol.manifest.manifest import Manifest, ModelSection
from swarm.vocabulary.types import ModuleId

Shape = tuple[int, ...]

ENDS: Final = ("model.embed_tokens.", "lm_head.")
"""What the names of the embedding's and the head's parameters begin with."""
BYTES_PER_PARAMETER: Final = 4
"""Parameters are float32."""


def parameter_shapes(manifest: Manifest, module: ModuleId) -> dict[str, Shape]:
    """The shape of every parameter of the module, by its name in the whole model.

    Raises:
        ValueError: the manifest has no such module.
    """
    if not manifest.has(module):
        raise ValueError(f"this run has no module {module}")
    blocks, model = manifest.stages.blocks, manifest.model
    first = sum(blocks[: module.stage])
    layers = {
        f"model.layers.{index}.{name}": shape
        for index in range(first, first + blocks[module.stage])
        for name, shape in _block_shapes(model).items()
    }
    if module.stage:
        return layers
    vocabulary = (model.vocabulary, model.hidden)
    return {
        "model.embed_tokens.weight": vocabulary,
        **layers,
        "model.norm.weight": (model.hidden,),
        "lm_head.weight": vocabulary,
    }


def is_block_matrix(name: str, shape: Shape) -> bool:
    """Whether a parameter is one of the matrices of a transformer block."""
    return len(shape) == 2 and not name.startswith(ENDS)


def demand_of(manifest: Manifest, module: ModuleId) -> float:
    """The share of the run's tokens that come to the module: all to stage 0, to the others as many as paths visit their
    stage, dealt among its experts. With unequal visits that of the mean stage."""
    stages = manifest.stages
    return stages.visited_per_path / (stages.count - 1) / stages.experts_at(module.stage) if module.stage else 1.0


def parameter_bytes(shapes: Mapping[str, Shape]) -> int:
    """The bytes that parameters of these shapes take in memory and in a file."""
    return BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in shapes.values())


def _block_shapes(model: ModelSection) -> dict[str, Shape]:
    hidden, kv_size, wide = model.hidden, model.kv_heads * model.head_size, model.feed_forward
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
