"""Names and shapes of a module's parameters, derived from the manifest."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

from protocol.manifest.manifest import Manifest, ModelSection
from swarm.vocabulary.types import ModuleId

Shape = tuple[int, ...]

EMBEDDING: Final = "model.embed_tokens.weight"
_ROWS: Final = "token_rows.embed_tokens.weight"  # Ends the name of a block's rows of low rank
HEAD: Final = "lm_head.weight"  # Name of the LM head if it is not tied to the embedding
BYTES_PER_PARAMETER: Final = 4
LEAST_ELEMENTS: Final = 4096  # Smallest matrix whose moments may have 8 bits, in elements (as in bitsandbytes)


def parameter_shapes(manifest: Manifest, module: ModuleId) -> dict[str, Shape]:
    """Returns the shape of every parameter of the module. Raises ValueError if the manifest has no such module."""
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
    embedding, rows = (model.vocabulary, model.stream), {f"model.{name}": size for name, size in _rows(model).items()}
    ends = {EMBEDDING: embedding, **layers, "model.norm.weight": (model.hidden,), **rows}
    return ends if model.tied_embeddings else {**ends, HEAD: (model.vocabulary, model.hidden)}


def names_in_part(manifest: Manifest, modules: Sequence[ModuleId]) -> dict[str, str]:
    """Returns the modules' parameters with their names in a model of these only, whose blocks have no gaps."""
    stages = {module.stage for module in modules}
    kept = list(accumulate(stage in stages for stage, count in enumerate(manifest.stages.blocks) for _ in range(count)))
    names = (name for module in modules for name in parameter_shapes(manifest, module))
    return {name: re.sub(r"(?<=^model\.layers\.)\d+", lambda n: str(kept[int(n[0])] - 1), name) for name in names}


def writes(name: str) -> bool:
    """Tells whether a parameter belongs to a layer whose output is added to hidden states."""
    return name.rpartition(".")[0].endswith(("self_attn.o_proj", "mlp.down_proj"))


def has_row_per_token(name: str) -> bool:
    return name == EMBEDDING or name.endswith(_ROWS)


def is_block_matrix(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and name != HEAD and not has_row_per_token(name)


def has_eight_bits(name: str, shape: Shape) -> bool:
    """Tells whether AdamW may store a parameter's moments in 8 bits: a large matrix, but no embedding."""
    return len(shape) == 2 and not has_row_per_token(name) and math.prod(shape) >= LEAST_ELEMENTS


def demand_of(manifest: Manifest, module: ModuleId) -> float:
    """Returns the module's share of the run's tokens, assuming that all stages are visited equally often."""
    return manifest.visit_share / manifest.stages.experts_at(module.stage) if module.stage else 1.0


def parameter_bytes(shapes: Mapping[str, Shape]) -> int:
    return BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in shapes.values())


def _block_shapes(model: ModelSection) -> dict[str, Shape]:
    hidden, kv_size, wide = model.hidden, model.kv_heads * model.head_size, model.feed_forward
    projections: dict[str, Shape] = {
        "q_proj": (model.query_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (model.stream, model.query_size),
    }
    norms = ("q_norm", "k_norm") if model.has_head_norms else ()
    return {
        "input_layernorm.weight": (hidden,),
        **{f"self_attn.{name}.weight": shape for name, shape in projections.items()},
        **{f"self_attn.{name}.bias": shape[:1] for name, shape in projections.items() if name in model.biased},
        **{f"self_attn.{name}.weight": (model.head_size,) for name in norms},
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (model.stream, wide),
        **_rows(model),
    }


def _rows(model: ModelSection) -> dict[str, Shape]:
    rank = model.token_rank
    return {_ROWS: (model.vocabulary, rank), "token_rows.spread.weight": (model.hidden, rank)} if rank else {}
