"""Checkpoints: a folder with one safetensors file for each module, and the manifest.

    manifest.toml           the run's signed manifest, byte for byte
    module-0.0.safetensors  embedding and head
    module-1.0.safetensors  ...

There is no shared file to coordinate over: each module's file says in its own header which run, module and step it is, and
carries a digest over that and the parameters. So several nodes can each write their module into the same folder, a file
is replaced whole or not at all, and one that was copied badly is found out when it is read. Never pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from node.model.initial import digest_of_tensors, parameters_of
from protocol.manifest import MAX_MANIFEST_BYTES
from swarm.errors import ConfigError, CorruptSnapshot, ProtocolViolation, StateError
from swarm.vocabulary import ModuleId, RunId

MANIFEST_NAME: Final = "manifest.toml"
_FORMAT: Final = "1"


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Where one run's checkpoint is written, and the run's identity that is written with it."""

    path: Path
    run: RunId
    manifest: bytes
    """The signed TOML file."""


@dataclass(frozen=True, slots=True)
class ModuleState:
    """What a module's file says of itself."""

    run: RunId
    module: ModuleId
    steps: int
    """Inner steps taken."""
    tokens: int
    """Tokens that the replica has trained on."""


def save_module(folder: CheckpointFolder, module: ModuleId, *parts: nn.Module, steps: int, tokens: int) -> Path:
    """Writes one module (stage 0's two parts together) and, where it is missing, the manifest. Replaces an older file.

    Raises:
        StateError: the folder belongs to another run, or could not be written.
    """
    tensors = {name: tensor.to(torch.float32).contiguous() for name, tensor in parameters_of(*parts).items()}
    state = ModuleState(folder.run, module, steps, tokens)
    header = {"format": _FORMAT, "state": _state_text(state)}
    header["sha256"] = _checksum(header["state"], tensors)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        _save_manifest(folder)
        target = module_file(folder.path, module)
        _replace(target, lambda beside: save_file(tensors, beside, metadata=header))
    except (OSError, SafetensorError) as error:
        raise StateError(
            f"the checkpoint of module {module} could not be written to {folder.path}: {error}",
            hint="Check the folder's free space and permissions.",
        ) from error
    return target


def load_module(path: Path, module: ModuleId, *parts: nn.Module) -> ModuleState:
    """Reads one module into its parts, in place; they are unchanged unless everything agrees.

    Raises:
        CorruptSnapshot: the file is damaged; its name is in the message.
        StateError: there is no such file, it is another module's, or of a model of another shape.
    """
    file = module_file(path, module)
    header, tensors = _read(file)
    state = _parse_state(file, header, tensors)
    parameters = parameters_of(*parts)
    if state.module != module or {n: t.shape for n, t in tensors.items()} != {
        n: p.shape for n, p in parameters.items()
    }:
        raise StateError(f"{file} is not module {module} of this model")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
    return state


def read_manifest(path: Path) -> bytes:
    """The signed manifest of a checkpoint.

    Raises:
        ConfigError: there is no checkpoint in this folder.
    """
    try:
        with (path / MANIFEST_NAME).open("rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)  # one more than may be: the parser refuses it
    except OSError as error:
        raise ConfigError(f"{path} is not a checkpoint: {MANIFEST_NAME} cannot be read: {error.strerror}") from None


def module_file(path: Path, module: ModuleId) -> Path:
    """Where a module's parameters lie."""
    return path / f"module-{module}.safetensors"


def _save_manifest(folder: CheckpointFolder) -> None:
    """Two nodes that come here at once write the same bytes, so it does not matter who is last."""
    target = folder.path / MANIFEST_NAME
    if not target.exists():
        _replace(target, lambda beside: beside.write_bytes(folder.manifest))
    elif target.read_bytes() != folder.manifest:
        raise StateError(f"{folder.path} holds the checkpoint of another run", hint="Name another or an empty folder.")


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Writes beside the target and renames, each made durable, so that a crash leaves the old file or the new one."""
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        write(beside)
        _flush(beside)
        beside.replace(target)
        _flush(target.parent)
    finally:
        beside.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """fsync of a file, or of the folder that a rename has changed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(file: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except FileNotFoundError:
        raise StateError(f"the checkpoint has no file {file}") from None
    except (OSError, SafetensorError) as error:
        raise CorruptSnapshot(f"{file} cannot be read: {error}") from error


def _parse_state(file: Path, header: dict[str, str], tensors: dict[str, Tensor]) -> ModuleState:
    """The header's state, once header and parameters have been found to be what was written."""
    text = header.get("state", "")
    if header.get("format") != _FORMAT or header.get("sha256") != _checksum(text, tensors):
        raise CorruptSnapshot(f"{file} is not what was written: its contents do not match the hash in its header")
    try:
        fields: dict[str, Any] = json.loads(text)
        return ModuleState(**(fields | {"module": ModuleId(**fields["module"])}))
    except (ValueError, TypeError, KeyError, ProtocolViolation) as error:
        raise CorruptSnapshot(f"{file} says of itself what this version does not understand: {error}") from error


def _state_text(state: ModuleState) -> str:
    return json.dumps(dataclasses.asdict(state), sort_keys=True)


def _checksum(state: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(state.encode() + b"\0" + digest_of_tensors(tensors)).hexdigest()
