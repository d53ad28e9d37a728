"""Folders of tiny models with random weights, as `transformers` writes them, one for each thing that a family has."""

import json
import os
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from node.export.hugging_face import byte_tokenizer
from node.local_swarm.default_manifest import default_manifest
from node.model.shapes import parameter_shapes
from node.start.cut_model import model_table
from protocol.manifest.manifest import manifest_from_table
from swarm.vocabulary.types import ModuleId

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
}
LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama, grouped and tied": ("Llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, stretched": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral with a window": ("Mistral", {"sliding_window": 64}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2, tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, tied, with biases": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
}


def write_model(folder: Path, which: str = "llama", seed: int = 0, **changes: Any) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # a folder of one's own needs nobody
    import transformers

    kind, own = MODELS[which]
    config = getattr(transformers, f"{kind}Config")(**SIZES | own | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms that are all 1 and biases that are all 0 would hide themselves
            parameter.add_(torch.randn(parameter.shape) * 0.15)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
    return model


def write_folder(folder: Path, which: str = "llama", seed: int = 0, **changes: Any) -> None:
    """Writes such a folder without `transformers`, whose import takes seconds."""
    kind, own = MODELS[which]
    config = SIZES | own | changes | {"model_type": kind.lower()}
    base = default_manifest(0).model_dump() | {"model": model_table(config, 64)}
    base["stages"]["blocks"] = (SIZES["num_hidden_layers"],)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.15 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in parameter_shapes(manifest_from_table(base), ModuleId(0)).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()))
