"""A Hugging Face model folder: its files are found and their headers checked before any parameter is read.

Only `safetensors` files are opened, which hold numbers and nothing else; pickles (`.bin`, `.pt`) can run whatever their
maker wanted. Parameters are read a piece at a time, so that a model need not fit into memory to be cut.
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
from node.start.model_config import Config, parse_config
from swarm.vocabulary.errors import ConfigError

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
    """The folder of an existing model, open for reading by any thread.

    Raises:
        ConfigError: it is none, or a file of it is damaged, missing, of another kind, or lies elsewhere.
    """

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
        """Compares all headers with the parameters of a model: the folder must have these, in a type that is read, and
        no others.

        Raises:
            ConfigError: says which parameter is missing, unknown, or another one.
        """
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
        """Reads the elements of a parameter from number `first` on into `out`, as many as that is long, as float32.

        Raises:
            ConfigError: the file cannot be read any more, or an element is not finite.
        """
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
        """The place of the model's tokenizer file.

        Raises:
            ConfigError: there is none.
        """
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
        """Where a file really lies: in the folder, or, in a cache of the Hugging Face hub, among its blobs.

        Raises:
            ConfigError: elsewhere.
            FileNotFoundError: nowhere.
        """
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
