"""A model folder's `config.json`, read as the manifest's description of a model; what this program does not compute is
refused with a sentence, never passed over.

Keys and defaults are those of LlamaConfig, MistralConfig, Qwen2Config and Qwen3Config of transformers 4 and 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from swarm.vocabulary.errors import ConfigError

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
SEQUENCE: Final = 1024
"""Tokens of a row where nothing else is said, if the model takes so many."""
_MISTRAL_WINDOW: Final = 4096
_QWEN3_HEAD_DIM: Final = 128

Config = Mapping[str, Any]


def parse_config(text: bytes) -> Config:
    """The JSON object of a `config.json`.

    Raises:
        ConfigError: it is none.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config.json is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError("config.json is not a JSON object")
    return config


def blocks_of(config: Config) -> int:
    """The number of the model's transformer blocks. Raises ConfigError."""
    return _whole(config, "num_hidden_layers")


def model_table(config: Config, sequence: int | None = None) -> dict[str, Any]:
    """The keys of the manifest's `[model]` that follow from the folder; `dtype` and `attention` are the run's.

    Args:
        sequence: tokens of a row; None for 1024, or as many as the model takes.

    Raises:
        ConfigError: the model is of another family, or has what is not computed here.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"this is a model of type {str(family)[:40]!r}; a run can start from {', '.join(FAMILIES)}",
            hint="Name the folder of a model of one of these families.",
        )
    _require_computed(family, config)
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and family == "qwen3":
        head_dim = _QWEN3_HEAD_DIM
    theta, scaling = _rotary(config)
    most = config.get("max_position_embeddings")
    window = config.get("sliding_window", _MISTRAL_WINDOW) if family == "mistral" else None
    longest = min(value for value in (most, window, SEQUENCE) if value is not None)
    return {
        "family": family,
        "vocabulary": _whole(config, "vocab_size"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads if config.get("num_key_value_heads") is None else _whole(config, "num_key_value_heads"),
        "head_dim": None if head_dim is None or head_dim * heads == hidden else head_dim,
        "feed_forward": _whole(config, "intermediate_size"),
        "sequence": sequence or longest,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_epsilon": _number(config, "rms_norm_eps", 1e-6),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "attention_bias": family in ("llama", "qwen3") and config.get("attention_bias", False),
        "positions": most,
        "sliding_window": window,
    }


def _require_computed(family: str, config: Config) -> None:
    """Raises ConfigError for what would make another model of it than the one that is computed here."""
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"its activation is {str(config['hidden_act'])[:40]!r}; only silu is computed here")
    if config.get("quantization_config") is not None:
        raise ConfigError("its weights are quantized", hint="Name the folder of the model as it was before that.")
    if config.get("mlp_bias", False) is not False:
        raise ConfigError("its feed-forward layers have biases (mlp_bias), which are not computed here")
    if family == "mistral" and config.get("attention_bias", False) is not False:
        raise ConfigError("a Mistral model with biases (attention_bias) is not computed here")
    slides = config.get("use_sliding_window", False) or "sliding_attention" in (config.get("layer_types") or ())
    if family != "mistral" and slides:
        raise ConfigError("some of its blocks have a sliding window (use_sliding_window), which is not computed here")
    if config.get("num_key_value_heads") is None and family != "llama":
        raise ConfigError("config.json: num_key_value_heads is missing")


def _rotary(config: Config) -> tuple[float, dict[str, Any] | None]:
    """Theta and the scaling of the rotary embedding, as transformers 5 (`rope_parameters`) or 4 writes them."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        raise ConfigError("config.json: rope_scaling is not a table")
    theta = _number(said if "rope_theta" in said else config, "rope_theta", 10_000.0)
    if said.get("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("only a part of each head is turned (partial_rotary_factor), which is not computed here")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"kind": kind, "factor": _number(said, "factor")}
    if kind != "llama3":
        raise ConfigError(
            f"its rotary embedding is scaled by {str(kind)[:40]!r}; only linear and llama3 are computed here"
        )
    first = "original_max_position_embeddings"
    return theta, {
        "kind": kind,
        "factor": _number(said, "factor"),
        "low_frequency_factor": _number(said, "low_freq_factor"),
        "high_frequency_factor": _number(said, "high_freq_factor"),
        "original_positions": _whole(said if first in said else config, first),
    }


def _whole(table: Config, key: str) -> int:
    value = table.get(key)
    if type(value) is not int or not 1 <= value < 2**31:
        raise ConfigError(f"config.json: {key} must be a whole number above 0, but is {str(value)[:40]!r}")
    return value


def _number(table: Config, key: str, default: float | None = None) -> float:
    value = table.get(key, default)
    if type(value) not in (int, float):
        raise ConfigError(f"config.json: {key} must be a number, but is {str(value)[:40]!r}")
    return float(value)
