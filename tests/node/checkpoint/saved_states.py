"""Small replica states, the folder they are saved to, and a storage that fails or dies at a chosen step."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from node.averaging.anchor.anchor import Anchor, hash_all, version_of
from node.averaging.anchor.shared_vector import Layout, SharedVector, cut_vector, layout_of
from node.checkpoint.folder import CheckpointFolder, Storage, own_tensors, save_state
from node.checkpoint.saver import capture_module
from node.checkpoint.state import AnchorState, Counters, DataState, ReplicaState
from node.data.documents import StreamPosition
from node.data.local_paths import NO_LOCAL_PATHS, LocalPathOptions
from node.data.packing import Cursor
from node.export.open_model import open_model
from node.export.source import routed_model
from node.export.writer import Export, export
from node.model.decoder import Decoder
from node.model.initialization import parameters_of
from node.model.optimizer import Accumulator, InnerOptimizer, InnerState
from node.model.optimizers.inner_rule import ParameterState
from node.network.loss_report import WHOLE_MODEL, AskedPaths
from node.solo.trainer import WholeModel, solo_peer
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, Route
from tests.node.small_manifest import small_manifest

ONE = ModuleId(1)
PEER, OTHER = PeerId("12D3KooWpeer"), PeerId("12D3KooWother")


def folder_at(path: Path, storage: Storage | None = None, manifest: Manifest | None = None) -> CheckpointFolder:
    signed = sign_manifest(manifest or small_manifest(), Identity.generate())
    return CheckpointFolder(path, signed.run, signed.text, storage or Storage())


def version(round_: int, digest: int = 7) -> AnchorVersion:
    return AnchorVersion(round_, 10 * round_, 640 * round_, 0, bytes([digest]) * 32)


def state_of(
    value: float,
    *,
    steps: int = 4,
    anchor: AnchorVersion | None = None,
    tokens: int = 256,
    cursor: Cursor | None = None,
) -> ReplicaState:
    """A module of two parameters, all of whose numbers follow from `value`."""

    def tensors(factor: float) -> dict[str, torch.Tensor]:
        matrix = torch.arange(6, dtype=torch.float32).reshape(2, 3) * factor + value
        return {"w": matrix, "norm": torch.tensor([value, factor])}

    agreed = None if anchor is None else AnchorState(anchor, tensors(4.0), tensors(5.0))
    slots = {"exp_avg": tensors(2.0), "exp_avg_sq": tensors(3.0)}
    of = {name: {slot: by_name[name] for slot, by_name in slots.items()} for name in ("w", "norm")}
    moved = {"w": ParameterState(steps, of["w"]), "norm": ParameterState(steps - 1, of["norm"])}
    inner = InnerState(steps, moved)
    data = None if cursor is None else DataState(cursor, 12, 8, 1, 0, 5.5, 4.25)
    return ReplicaState(tensors(1.0), inner, Counters(tokens, 8, 3, tokens), agreed, data)


CURSOR = Cursor(StreamPosition(1, 22, 333), 44)


def same(left: ReplicaState, right: ReplicaState) -> bool:
    ours, theirs = _tensors(left), _tensors(right)
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
        and (left.counters, left.data, left.inner.steps) == (right.counters, right.data, right.inner.steps)
        and _moved(left) == _moved(right)
        and (left.anchor is None) == (right.anchor is None)
        and (left.anchor is None or right.anchor is None or left.anchor.version == right.anchor.version)
    )


def _tensors(state: ReplicaState) -> dict[str, torch.Tensor]:
    named = own_tensors(state.local, state.inner)
    if state.anchor is not None:
        for group, tensors in (("anchor", state.anchor.parameters), ("momentum", state.anchor.momentum or {})):
            named |= {f"{group}/{name}": tensor for name, tensor in tensors.items()}
    return named


def _moved(state: ReplicaState) -> dict[str, int]:
    return {name: own.steps for name, own in state.inner.parameters.items()}


class SteppedStorage(Storage):
    """The real disk, with a hook before every operation; of a write, before and after each piece."""

    def __init__(self, before: Callable[[str], None]) -> None:
        self._before = before

    def __getattribute__(self, name: str) -> Any:
        if name in ("make_folder", "write", "sync", "rename", "remove"):
            self._before(name)
        return super().__getattribute__(name)

    def write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        super().write(path, self._stepped(pieces))

    def _stepped(self, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            half = len(piece) // 2
            for part in (piece[:half], piece[half:]):
                yield part
                self._before("written")


class Countdown:
    def __init__(self, at: int, then: Callable[[], None]) -> None:
        self.steps: list[str] = []
        self._at = at
        self._then = then

    def __call__(self, step: str) -> None:
        self.steps.append(step)
        if len(self.steps) == self._at:
            self._then()


def flip(file: Path, at: int = -1, by: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= by
    file.write_bytes(content)


def die() -> None:
    """As a machine that loses power, as far as a process can: nothing of this one is run any more."""
    os.kill(os.getpid(), signal.SIGKILL)


CPU = torch.device("cpu")


def noisy_model(manifest: Manifest) -> WholeModel:
    """Norm weights that are all 1 would hide where they are applied; weights this small, what attention does."""
    model = WholeModel(manifest, CPU)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parts in model.modules():
            for parameter in parameters_of(*parts).values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def save_checkpoint(path: Path, manifest: Manifest, model: WholeModel | None = None) -> Path:
    signed = sign_manifest(manifest, Identity.generate())
    folder = CheckpointFolder(path, signed.run, signed.text)
    for module, parts in (model or noisy_model(manifest)).modules():
        optimizer = InnerOptimizer(manifest, ModuleId(0), [Accumulator(part) for part in parts])
        save_state(folder, solo_peer(module), module, capture_module(parts, optimizer, visits=1, tokens=64))
    return path


def file_of(checkpoint: Path, module: str) -> Path:
    """The only snapshot's tensors of a module such as `1.0`."""
    (file,) = (checkpoint / f"solo-{module}").glob("*.safetensors")
    return file


@torch.no_grad()
def logits_of(model: WholeModel, tokens: torch.Tensor) -> torch.Tensor:
    hidden = model.embedding(tokens)
    for stack in model.stacks:
        hidden = stack(hidden)
    return model.head.logits(hidden)


def exported(
    source: Path, target: Path, *, told: LocalPathOptions = NO_LOCAL_PATHS, paths: AskedPaths = WHOLE_MODEL, **how: Any
) -> Export:
    async def run() -> Export:
        async with open_model(str(source), local_path_options=told) as opened:
            opened.narrow(paths)
            return await export(opened.source, target, tokenizer_file=opened.tokenizer_file(), **how)

    return asyncio.run(run())


def decoder_of(folder: Path, route: Route | None = None) -> Decoder:
    async def run() -> Decoder:
        async with open_model(str(folder)) as opened:
            return await (await routed_model(opened.source, CPU)).decoder(route)

    return asyncio.run(run())


ELEMENTS = 20 * 4096 + 100


def small_layout(elements: int = ELEMENTS, fragments: int = 1) -> Layout:
    return layout_of({"model.layers.0.weight": (elements,)}, fragments)


def state(round_number: int, layout: Layout | None = None) -> Anchor:
    """The state after a round: random numbers that follow from the round's number."""
    layout = layout or small_layout()
    numbers = np.random.default_rng(round_number)
    parameters, momentum = (cut_vector(layout, numbers.standard_normal(layout.elements, np.float32)) for _ in range(2))
    hashes = hash_all(layout, parameters, momentum)
    version = version_of(layout, hashes, round_number, 10 * round_number, 1000 * round_number, 0)
    return Anchor(layout, version, parameters, momentum, hashes)


def written(anchor: Anchor, parameters: SharedVector, momentum: SharedVector) -> Anchor:
    for source, target in ((anchor.parameters, parameters), (anchor.momentum, momentum)):
        for part, array in target.pieces():
            array[:] = source[part]
    return Anchor(anchor.layout, anchor.version, parameters, momentum, anchor.hashes)
