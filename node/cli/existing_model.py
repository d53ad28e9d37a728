"""The manifest of a run that starts from an existing model, as `skipstone new --from-model` makes it.

It stands alone because the folder is read only where one was named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from protocol.manifest.manifest import Manifest

STEP_ROWS: Final = 16
"""Rows of an inner step, where no manifest says otherwise."""
RATE: Final = 3e-5
"""The learning rate there: what pre-trained models are commonly fine-tuned with."""


def starting_from(path: Path, base: Manifest, *, is_default: bool, keeps_blocks: bool) -> Manifest:
    """The manifest `base` with the model, tokenizer and weights of a folder.

    Args:
        is_default: whether nobody has chosen the base's training, so that one for fine-tuning takes its place.
        keeps_blocks: whether its stages are to have just the blocks that they have.

    Raises:
        ConfigError: the folder is no model that can be started from, or has other blocks than the stages.
        ManifestError: what follows from it is no manifest.
    """
    from node.data.tokenizers import tokenizer_keys
    from node.dial.cut import spread
    from node.start.cut_model import CutModel
    from node.start.model_config import blocks_of, model_table
    from node.start.model_folder import TOKENIZER, ModelFolder
    from protocol.manifest.manifest import manifest_from_table

    folder = ModelFolder(path)
    table = base.model_dump()
    model = model_table(folder.config, None if is_default else base.model.sequence)
    table["model"] = {"dtype": base.model.dtype, "attention": base.model.attention, **model}
    folder.tokenizer()  # is in the folder, and not elsewhere
    table["data"] |= tokenizer_keys(path / TOKENIZER)
    if not keeps_blocks:
        table["stages"] |= {"blocks": spread(blocks_of(folder.config), base.stages.count), "per_path": None}
    if is_default:
        table["training"] = _fine_tuning(model, table["training"])
    manifest = manifest_from_table(table | {"start": None})
    start = {"modules": CutModel(manifest, folder).digests()}
    return manifest_from_table(manifest.model_dump() | {"start": start})


def _fine_tuning(model: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of 16 rows, and a low rate: large steps would undo what the model has learnt."""
    step = STEP_ROWS * model["sequence"]
    schedule = training["schedule"] | {"warmup_tokens": 20 * step, "total_tokens": 1000 * step}
    inner = training["inner"] | {"learning_rate": RATE, "weight_decay": 0.0}
    return {**training, "rows": 1, "inner_tokens": step, "inner": inner, "schedule": schedule}
