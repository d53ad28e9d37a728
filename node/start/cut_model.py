"""A Hugging Face model folder, cut into the modules of a run: first anchors, whose digests are in the manifest."""

import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from node.averaging.anchor.anchor import Anchor, hash_of, initial_anchor, version_of
from node.averaging.anchor.shared_vector import Layout, Vector, empty_vector, layout_of
from node.checkpoint.folder import check_header_size
from node.data.files import open_regular, read_table, require_no_pointer, resolved
from node.model.shapes import EMBEDDING, HEAD, Shape, parameter_shapes
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import AnchorVersion, ModuleId

log = logging.getLogger(__name__)

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")  # With the keys of transformers 4 and 5
SEQUENCE: Final = 1024  # Longest default row in tokens

Config = Mapping[str, Any]


def blocks_of(config: Config) -> int:
    """Returns the number of the model's transformer blocks. Raises ConfigError."""
    return _whole(config, "num_hidden_layers")


def model_table(config: Config, sequence: int | None = None) -> dict[str, Any]:
    """Derives the manifest's `[model]` keys from the folder. Raises ConfigError for unsupported models."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"a run cannot start from model type {str(family)[:40]!r}, only from {', '.join(FAMILIES)}",
            hint="Choose a model of one of these families.",
        )
    _require_computed(family, config)
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and family == "qwen3":  # here and below, defaults of transformers for absent keys
        head_dim = 128
    theta, scaling = _rotary(config)
    most = config.get("max_position_embeddings")
    window = config.get("sliding_window", 4096) if family == "mistral" else None
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
    """Raises ConfigError if the folder's model has options that this project does not compute."""
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"activation {str(config['hidden_act'])[:40]!r} is not supported, only silu")
    if config.get("quantization_config") is not None:
        raise ConfigError("quantized weights are not supported", hint="Choose the folder of the original model.")
    if config.get("mlp_bias", False) is not False:
        raise ConfigError("biases in feed-forward layers (mlp_bias) are not supported")
    if family == "mistral" and config.get("attention_bias", False) is not False:
        raise ConfigError("a Mistral model with biases (attention_bias) is not supported")
    if family != "mistral" and _slides(config):
        raise ConfigError("blocks with a sliding window (use_sliding_window) are not supported")
    if config.get("num_key_value_heads") is None and family != "llama":  # only LlamaConfig has a default
        raise ConfigError("config.json: num_key_value_heads is missing")


def _slides(config: Config) -> bool:
    """Whether any block of a Qwen model has a sliding window, as transformers decides it."""
    if isinstance(kinds := config.get("layer_types"), list):
        return "sliding_attention" in kinds
    full = config.get("max_window_layers", 28)
    is_used = config.get("use_sliding_window", False) and config.get("sliding_window", 0) is not None
    return bool(is_used) and not (type(full) is int and full >= blocks_of(config))


def _rotary(config: Config) -> tuple[float, dict[str, Any] | None]:
    """Reads theta and scaling of the rotary embedding, as transformers 5 (`rope_parameters`) or 4 writes them."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        raise ConfigError("config.json: rope_scaling is not a table")
    theta = _number(said if "rope_theta" in said else config, "rope_theta", 10_000.0)
    if said.get("partial_rotary_factor", 1.0) != 1.0 or config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial rotary embeddings (partial_rotary_factor) are not supported")
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, {"kind": kind, "factor": _number(said, "factor")}
    if kind != "llama3":
        raise ConfigError(f"rotary scaling {str(kind)[:40]!r} is not supported, only linear and llama3")
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
_HINT: Final = "Choose a model folder with config.json and model.safetensors."
MAX_FILES: Final = 4096
TYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_ROTARY_CONSTANT: Final = "rotary_emb.inv_freq"  # a constant that old exports contain; it is computed, not read


class ModelFolder:
    """Folder of an existing model, open for reading by any thread. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            hint = "Choose the folder with the model's config.json. `hf download NAME` fetches one and prints it."
            raise ConfigError(f"{path} is not a folder", hint=hint)
        self.path = path
        self._lock = threading.Lock()
        self.config: Config = read_table(path / CONFIG, 2**20, _HINT)
        self._files: dict[str, Any] = {}
        for name in self._weight_files():
            self._open(name)
        self.is_tied = self.config.get("tie_word_embeddings") is True and not self._embeddings_differ()
        # The embedding of a tied model may be stored as the head only.
        self._stored = {EMBEDDING: HEAD} if self.is_tied and EMBEDDING not in self._files else {}

    def require(self, wanted: Mapping[str, Shape]) -> None:
        """Checks that the folder has exactly these parameters, in readable types. Raises ConfigError."""
        for name, shape in wanted.items():
            if self._stored.get(name, name) not in self._files:
                raise ConfigError(f"{self.path} has no parameter {name}, but its config.json needs one")
            header = self._view(name)
            found, kind = tuple(header.get_shape()), header.get_dtype()
            if found != shape:
                raise ConfigError(f"{self.path}: {name} is {found}, but config.json needs {shape}")
            if kind not in TYPES:
                raise ConfigError(f"{self.path}: {name} has type {kind}, not one of {', '.join(TYPES)}")
        for name in self._files.keys() - wanted.keys():
            if name != HEAD and not name.endswith(_ROTARY_CONSTANT):  # a folder may store it although it is tied
                raise ConfigError(f"{self.path} has a parameter {name}, but its config.json has no place for it")

    def read(self, name: str, first: int, out: Vector) -> None:
        """Reads elements of a parameter, starting at `first`, into `out` as float32. Raises ConfigError."""
        last = first + len(out)
        try:
            with self._lock:
                view = self._view(name)
                width = math.prod(view.get_shape()[1:])  # safetensors slices whole rows only
                rows = view[first // width : -(-last // width)]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.path}: cannot read {name}: {error}") from error
        skipped = first - first // width * width
        torch.from_numpy(out).copy_(rows.flatten()[skipped : skipped + len(out)])
        if not np.isfinite(out).all():
            raise ConfigError(f"{self.path} is unusable: {name} has infinite or NaN values")

    def tokenizer(self) -> Path:
        """Returns the path of the model's tokenizer file. Raises ConfigError if it is missing."""
        if not (self.path / TOKENIZER).exists():
            raise ConfigError(
                f"{self.path} has no {TOKENIZER}",
                hint="Write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR).",
            )
        return self.path / TOKENIZER

    def _view(self, name: str) -> Any:
        stored = self._stored.get(name, name)
        return self._files[stored].get_slice(stored)

    def _embeddings_differ(self) -> bool:
        """Whether embedding and head are both stored, with different values. Then transformers does not tie them."""
        if not {EMBEDDING, HEAD} <= self._files.keys():
            return False
        one, other = (self._files[name].get_slice(name) for name in (EMBEDDING, HEAD))
        parts = (slice(at, at + 1024) for at in range(0, one.get_shape()[0], 1024))
        return one.get_shape() != other.get_shape() or not all(torch.equal(one[part], other[part]) for part in parts)

    def _weight_files(self) -> list[str]:
        # In the order of transformers, which may leave an old index beside a new file.
        if os.path.lexists(self.path / SINGLE):  # a broken link is named when it is opened
            if (self.path / INDEX).exists():
                log.warning("%s has both %s and %s: reading %s", self.path, SINGLE, INDEX, SINGLE)
            return [SINGLE]
        if (self.path / INDEX).exists():
            return self._indexed()
        if any(file.suffix in (".bin", ".pt", ".pth") for file in self.path.iterdir()):
            raise ConfigError(
                f"{self.path} has only pickled weights, which could run code and are not opened",
                hint="Convert one that you trust: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OTHER).",
            )
        raise ConfigError(f"{self.path} has no {SINGLE} and no {INDEX}")

    def _indexed(self) -> list[str]:
        index = read_table(self.path / INDEX, 2**24, _HINT)
        try:
            files = {str(file) for file in index["weight_map"].values()}
        except (KeyError, AttributeError):
            raise ConfigError(f"{self.path / INDEX} does not map parameters to files") from None
        if not 1 <= len(files) <= MAX_FILES:
            raise ConfigError(f"{self.path / INDEX} names {len(files)} files, not 1 to {MAX_FILES}")
        odd = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
        if odd:
            raise ConfigError(f"{self.path / INDEX} names {odd[0][:80]!r}, not a safetensors file of this folder")
        return sorted(files)

    def _open(self, name: str) -> None:
        try:
            file_path = resolved(self.path / name)  # the user named the folder, so follow its links
            with open_regular(file_path) as file:
                require_no_pointer(file_path, file.read(64))
                file.seek(0)
                check_header_size(file)
            opened: Any = safe_open(file_path, framework="pt")  # never pickles, which can run code
            names = list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {self.path / name}: {error}") from error
        for tensor in names:
            if tensor in self._files:
                raise ConfigError(f"{self.path}: parameter {tensor} is in two files")
            self._files[tensor] = opened


_OTHER: Final = "Choose the folder from which `skipstone new --from-model` made this run."


def module_layout(manifest: Manifest, module: ModuleId) -> Layout:
    """Returns the layout of a module's anchor vectors: parameters and fragments."""
    return layout_of(parameter_shapes(manifest, module), manifest.training.fragments)


def first_version(manifest: Manifest, module: ModuleId) -> AnchorVersion:
    """Returns the version of a module's first anchor, for a run that starts from an existing model."""
    assert manifest.start is not None, "the run has a start"
    return AnchorVersion(0, 0, 0, 0, bytes.fromhex(manifest.start.modules[module.stage]))


@dataclass(frozen=True, slots=True, eq=False)
class FirstAnchor:
    """A first anchor whose chunks are read from the folder on demand, to serve them to peers."""

    version: AnchorVersion
    layout: Layout
    hashes: tuple[bytes, ...]
    _folder: ModelFolder

    def chunk(self, number: int) -> memoryview:
        """Reads a chunk; the second half of the chunks is outer momentum, all zeros. Raises IndexError, ConfigError."""
        if not 0 <= number < 2 * self.layout.chunks:
            raise IndexError(f"chunk {number} of {2 * self.layout.chunks}")
        part = self.layout.range_of(number % self.layout.chunks, number % self.layout.chunks + 1)
        values: Vector = np.zeros(part.stop - part.start, np.float32)
        if number < self.layout.chunks:  # the second half of the chunks is outer momentum, which starts at zero
            _read(self._folder, self.layout, part, values)
        return values.view(np.uint8).data


class CutModel:
    """A model folder cut into the modules of a manifest. Thread-safe. Raises ConfigError if parameters differ."""

    def __init__(self, manifest: Manifest, folder: ModelFolder) -> None:
        self._manifest = manifest
        self._folder = folder
        self._lock = threading.Lock()
        self._anchors: dict[int, FirstAnchor] = {}
        there, cut = blocks_of(folder.config), sum(manifest.stages.blocks)
        if there != cut:
            raise ConfigError(f"{folder.path} has {there} blocks, but the run's stages have {cut}")
        wanted: dict[str, Shape] = {}
        for stage in range(manifest.stages.count):
            wanted |= parameter_shapes(manifest, ModuleId(stage))
        folder.require(wanted)

    def digests(self) -> tuple[str, ...]:
        """Computes the hex digest of each stage's first anchor. Reads the whole model. Raises ConfigError."""
        return tuple(self.first_anchor(stage).version.digest.hex() for stage in range(self._manifest.stages.count))

    def first_anchor(self, stage: int) -> FirstAnchor:
        """Returns a stage's first anchor, for peers. The first call reads the whole stage. Raises ConfigError."""
        with self._lock:
            if stage not in self._anchors:
                self._anchors[stage] = self._hashed(stage)
            return self._anchors[stage]

    def has(self, module: ModuleId, digest: bytes) -> bool:
        """Whether `digest` is the digest of the module's first anchor in the manifest."""
        return self._manifest.has(module) and first_version(self._manifest, module).digest == digest

    def hashed(self, module: ModuleId, digest: bytes) -> FirstAnchor | None:
        """Returns the first anchor with this digest if it was hashed before, else None. Never waits."""
        found = self._anchors.get(module.stage)
        return found if found is not None and found.version.digest == digest else None

    def anchor(self, module: ModuleId) -> Anchor:
        """Loads a module's first anchor into memory. Raises ConfigError for another model's folder, OutOfMemory."""
        layout = module_layout(self._manifest, module)
        parameters = empty_vector(layout)
        for part, array in parameters.pieces():
            _read(self._folder, layout, part, array)
        anchor = initial_anchor(layout, parameters)
        if anchor.version != first_version(self._manifest, module):
            raise ConfigError(f"{self._folder.path} is not this run's model: module {module} differs", hint=_OTHER)
        return anchor

    def _hashed(self, stage: int) -> FirstAnchor:
        layout = module_layout(self._manifest, ModuleId(stage))
        blank = FirstAnchor(AnchorVersion(0, 0, 0, 0, bytes(32)), layout, (), self._folder)
        parameters = [hash_of(blank.chunk(number)) for number in range(layout.chunks)]
        parts = [layout.range_of(number, number + 1) for number in range(layout.chunks)]
        # Zero chunks come in at most two sizes, so hash each size once.
        zeros = {size: hash_of(memoryview(bytes(size))) for size in {4 * (part.stop - part.start) for part in parts}}
        momentum = [zeros[4 * (part.stop - part.start)] for part in parts]
        hashes = (*parameters, *momentum)
        return FirstAnchor(version_of(layout, hashes, 0, 0, 0, 0), layout, hashes, self._folder)


def open_start(manifest: Manifest, path: Path | None) -> CutModel | None:
    """Opens the folder from which a run starts; None without a path. Raises ConfigError."""
    if path is None:
        return None
    if manifest.start is None:
        raise ConfigError("this run does not start from an existing model", hint="Remove --model.")
    return CutModel(manifest, ModelFolder(path))


def _read(folder: ModelFolder, layout: Layout, part: slice, out: Vector) -> None:
    """Reads the range `part` of the vector of all the module's parameters from the folder into `out`."""
    for span in layout.spans:
        start, stop = max(span.start, part.start), min(span.stop, part.stop)
        if start < stop:
            folder.read(span.name, start - span.start, out[start - part.start : stop - part.start])
