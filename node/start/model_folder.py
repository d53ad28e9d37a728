"""A Hugging Face model folder: `config.json` as the manifest's model, checked headers, and parameters by the piece.

Only `safetensors` files are opened; pickles (`.bin`, `.pt`) can run code. Unsupported configs are refused with a
sentence. Keys and defaults are those of LlamaConfig and its kin of transformers 4 and 5.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from node.averaging.anchor.shared_vector import Vector
from node.data.files import open_regular
from node.model.shapes import HEAD, Shape
from swarm.vocabulary.errors import ConfigError

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
SEQUENCE: Final = 1024
"""Tokens of a row where nothing else is said, if the model takes so many."""
_MISTRAL_WINDOW: Final = 4096
_QWEN3_HEAD_DIM: Final = 128

Config = Mapping[str, Any]


def parse_config(text: bytes) -> Config:
    """The JSON object of a `config.json`. Raises ConfigError: it is none."""
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
    """The keys of the manifest's `[model]` that follow from the folder. `sequence` None: 1024, or the model's most.

    Raises:
        ConfigError: The model is of another family, or has what is not computed here.
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


CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
TOKENIZER: Final = "tokenizer.json"
MAX_CONFIG_BYTES: Final = 2**20
MAX_INDEX_BYTES: Final = 2**24
MAX_HEADER_BYTES: Final = 2**24
"""Of one file: names, shapes and places of 100,000 tensors."""
MAX_FILES: Final = 4096
TYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The element types that are read; float32 holds every value of each of them."""
_ROTARY_CONSTANT: Final = "rotary_emb.inv_freq"
"""What old folders keep of the rotary embedding follows from the config."""


class ModelFolder:
    """The folder of an existing model, open for reading by any thread. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder", hint="Name the folder with the model's config.json.")
        self.path = path
        self._root = path.resolve()
        self._lock = threading.Lock()
        self.config: Config = parse_config(self._read(CONFIG, MAX_CONFIG_BYTES))
        self._files: dict[str, Any] = {}
        """The opened file of each tensor."""
        for name in self._weight_files():
            self._open(name)

    def require(self, wanted: Mapping[str, Shape]) -> None:
        """Raises ConfigError unless the folder has exactly these parameters, in readable types."""
        for name, shape in wanted.items():
            if name not in self._files:
                raise ConfigError(f"{self.path} has no parameter {name}, which its config.json asks for")
            header = self._files[name].get_slice(name)
            found, kind = tuple(header.get_shape()), header.get_dtype()
            if found != shape:
                raise ConfigError(f"{self.path}: {name} is {found}, and config.json asks for {shape}")
            if kind not in TYPES:
                raise ConfigError(f"{self.path}: {name} is of type {kind}; read are {', '.join(TYPES)}")
        for name in self._files.keys() - wanted.keys():
            if name != HEAD and not name.endswith(_ROTARY_CONSTANT):  # a head in a folder whose embeddings are tied
                raise ConfigError(f"{self.path} has a parameter {name}, which models of its config.json do not have")

    def read(self, name: str, first: int, out: Vector) -> None:
        """Reads elements of a parameter from `first` on into `out` as float32. Raises ConfigError."""
        last = first + len(out)
        try:
            with self._lock:
                view = self._files[name].get_slice(name)
                width = math.prod(view.get_shape()[1:])
                rows = view[first // width : -(-last // width)]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path}: {name} cannot be read: {error}") from error
        skipped = first - first // width * width
        values = rows.flatten()[skipped : skipped + len(out)]
        torch.from_numpy(out).copy_(values)
        if not np.isfinite(out).all():
            raise ConfigError(f"{self.path} is of no use: {name} has values that are not finite")

    def tokenizer(self) -> Path:
        """The place of the model's tokenizer file. Raises ConfigError: there is none."""
        try:
            return self._place(TOKENIZER)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path} has no {TOKENIZER}",
                hint="Write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR).",
            ) from None

    def _weight_files(self) -> list[str]:
        if (self.path / INDEX).exists():
            return self._indexed()
        if (self.path / SINGLE).exists():
            return [SINGLE]
        if any(file.suffix in (".bin", ".pt", ".pth") for file in self.path.iterdir()):
            raise ConfigError(
                f"{self.path} has its weights as pickles only, which can run programs and are not opened",
                hint="Convert it with transformers where you trust it: AutoModelForCausalLM.from_pretrained(DIR)"
                ".save_pretrained(OTHER).",
            )
        raise ConfigError(f"{self.path} has no {SINGLE} and no {INDEX}")

    def _indexed(self) -> list[str]:
        try:
            index = json.loads(self._read(INDEX, MAX_INDEX_BYTES))
            files = {str(file) for file in index["weight_map"].values()}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{self.path / INDEX} does not say which parameter is in which file") from None
        if not 1 <= len(files) <= MAX_FILES:
            raise ConfigError(f"{self.path / INDEX} names {len(files)} files; allowed are 1 to {MAX_FILES}")
        odd = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
        if odd:
            raise ConfigError(f"{self.path / INDEX} names {odd[0][:80]!r}, which is no safetensors file of this folder")
        return sorted(files)

    def _open(self, name: str) -> None:
        try:
            place = self._place(name)
            with open_regular(place) as file:
                header = int.from_bytes(file.read(8), "little")
            if header > MAX_HEADER_BYTES:
                raise ConfigError(f"{self.path / name}: its header has {header} bytes, allowed are {MAX_HEADER_BYTES}")
            opened: Any = safe_open(place, framework="pt")
            names = list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path / name} cannot be read: {error}") from error
        for tensor in names:
            if tensor in self._files:
                raise ConfigError(f"{self.path}: parameter {tensor} is in two files")
            self._files[tensor] = opened

    def _place(self, name: str) -> Path:
        """The real path of a file in the folder or among its hub blobs. Raises ConfigError elsewhere,
        FileNotFoundError."""
        real = (self._root / name).resolve(strict=True)
        homes = [self._root]
        if self._root.parent.name == "snapshots":
            homes.append(self._root.parent.parent / "blobs")
        if not any(real.is_relative_to(home) for home in homes):
            raise ConfigError(f"{self.path / name} is a link that leads out of the folder")
        return real

    def _read(self, name: str, limit: int) -> bytes:
        try:
            with open_regular(self._place(name)) as file:
                text = file.read(limit + 1)
        except OSError as error:
            raise ConfigError(
                f"{self.path / name} cannot be read: {error.strerror or error}",
                hint="Name the folder of a model, with its config.json and model.safetensors.",
            ) from None
        if len(text) > limit:
            raise ConfigError(f"{self.path / name} is longer than {limit} bytes")
        return text
