"""Collection of every module of a checkpoint, out of the snapshots of all the peers that wrote into it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from node.checkpoint.folder import CheckpointFolder, Problem, read_manifest, whole_snapshots
from node.checkpoint.snapshot import Header, read_tensors
from protocol.manifest.signing import SignedManifest
from swarm.vocabulary.errors import CorruptSnapshot, StateError
from swarm.vocabulary.types import ModuleId, PeerId

_Progress = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A checkpoint's model."""

    signed: SignedManifest
    modules: Mapping[ModuleId, dict[str, Tensor]]
    """Float32 parameters by name, for every module of the run; each is read when it is asked for."""
    problems: tuple[Problem, ...]
    """Files that were left out because they are damaged."""


def gather_modules(path: Path) -> Gathered:
    """Loads the parameters of each module's newest anchor version: the mean of its replicas, weighted by tokens since.

    Raises:
        ConfigError, ManifestError: There is no checkpoint in this folder, or its manifest is damaged.
        CorruptSnapshot: A module has no intact snapshot.
        StateError: A module was never saved.
    """
    signed = read_manifest(path)
    folder, problems = CheckpointFolder(path, signed.run, signed.text), list[Problem]()
    replicas = [header for peer in _peers(path) for header in _newest_of_each_module(folder, peer, problems)]
    modules: dict[ModuleId, list[Header]] = {}
    for module in signed.manifest.modules():
        of_module = [header for header in replicas if header.owner.module == module]
        if not of_module:
            raise _missing(path, module, problems)
        modules[module] = _of_the_newest_anchor(of_module)
    return Gathered(signed, _Means(path, modules), tuple(problems))


class _Means(Mapping[ModuleId, dict[str, Tensor]]):
    """Reads a module's replicas anew each time it is asked for: a whole model may be more than fits into memory."""

    def __init__(self, path: Path, replicas: dict[ModuleId, list[Header]]) -> None:
        self._path = path
        self._replicas = replicas

    def __getitem__(self, module: ModuleId) -> dict[str, Tensor]:
        return _mean(self._path, self._replicas[module])

    def __iter__(self) -> Iterator[ModuleId]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)


def _peers(path: Path) -> list[PeerId]:
    return sorted(PeerId(entry.name) for entry in os.scandir(path) if entry.is_dir())


def _newest_of_each_module(folder: CheckpointFolder, peer: PeerId, problems: list[Problem]) -> list[Header]:
    """A peer that has moved has snapshots of both modules for a while."""
    newest: dict[ModuleId, Header] = {}
    for header in whole_snapshots(folder, peer, problems):
        newest.setdefault(header.owner.module, header)
    return list(newest.values())


def _of_the_newest_anchor(headers: list[Header]) -> list[Header]:
    version = max(headers, key=_progress).anchor
    return [header for header in headers if header.anchor == version]


def _progress(header: Header) -> tuple[_Progress, bytes]:
    """Order of anchors. The digest only settles which of two that cannot both be right is taken."""
    anchor = header.anchor
    return ((-1, 0, 0), b"") if anchor is None else ((anchor.round, anchor.steps, anchor.tokens), anchor.digest)


def _mean(path: Path, headers: list[Header]) -> dict[str, Tensor]:
    """Summed in float64, one replica in memory at a time."""
    if len(headers) == 1:
        return _parameters(path, headers[0])
    weights = [header.counters.tokens_since_anchor for header in headers]
    if not any(weights):
        weights = [1] * len(headers)
    total: dict[str, Tensor] = {}
    for header, weight in zip(headers, weights, strict=True):
        for name, tensor in _parameters(path, header).items():
            part = tensor.to(torch.float64) * (weight / sum(weights))
            total[name] = total[name] + part if name in total else part
    return {name: tensor.to(torch.float32) for name, tensor in total.items()}


def _parameters(path: Path, header: Header) -> dict[str, Tensor]:
    return read_tensors(path / header.owner.peer / header.file.name, "local")


def _missing(path: Path, module: ModuleId, problems: list[Problem]) -> StateError:
    if problems:
        names = "; ".join(str(problem) for problem in problems)
        return CorruptSnapshot(f"{path}: no snapshot of module {module} is whole: {names}")
    return StateError(
        f"{path} has no snapshot of module {module}",
        hint="A checkpoint of a swarm needs the folders of its peers, at least one for each module.",
    )
