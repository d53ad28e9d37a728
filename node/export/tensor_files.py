"""Reading of safetensors files, whose headers are compared with what is expected before any parameter is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from node.model.shapes import Shape
from swarm.vocabulary.errors import CorruptSnapshot, StateError


def names_in(file: Path) -> list[str]:
    """The names of the tensors in a file.

    Raises:
        CorruptSnapshot, StateError: the file is damaged, or not there.
    """
    with _Opened(file) as opened:
        return list(opened.keys())


def check_header(file: Path, wanted: Mapping[str, Shape]) -> None:
    """Compares the file's header with the shapes that are wanted; other tensors may be in it too.

    Raises:
        CorruptSnapshot: the file is damaged.
        StateError: it is not there, or lacks a tensor of this name, shape and type.
    """
    with _Opened(file) as opened:
        there = set(opened.keys())
        for name, shape in wanted.items():
            if name not in there:
                raise StateError(f"{file} has no parameter {name}")
            header = opened.get_slice(name)
            found = tuple(header.get_shape())
            if found != shape or header.get_dtype() != "F32":
                raise StateError(
                    f"{file} is not of this run's model: {name} is {header.get_dtype()} {found}, not F32 {shape}"
                )


def read_tensors(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads the named tensors into memory of their own.

    Raises:
        CorruptSnapshot, StateError: the file is damaged, or not there.
    """
    with _Opened(file) as opened:
        return {name: opened.get_tensor(name) for name in names}


class _Opened:
    """`safe_open` with our errors."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._opened: Any = None

    def __enter__(self) -> Any:
        try:
            self._opened = safe_open(self._file, framework="pt")
            return self._opened.__enter__()
        except FileNotFoundError:
            raise StateError(f"there is no file {self._file}") from None
        except (OSError, SafetensorError) as error:
            raise CorruptSnapshot(f"{self._file} cannot be read: {error}") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._opened.__exit__(kind, error, trace)
        if isinstance(error, OSError | SafetensorError):
            raise CorruptSnapshot(f"{self._file} cannot be read: {error}") from error
