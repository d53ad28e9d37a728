"""A module's state during its download: decodes, checks and stores chunks, and keeps them across restarts."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

from node.averaging.anchor.anchor import Anchor, chunk_bytes, hash_of
from node.averaging.anchor.shared_vector import Layout, SharedVector, StateVectors, empty_vector
from protocol.codecs import decode
from protocol.codecs.memory import octets_of_tensor
from protocol.frames.frames import HashList
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec

log = logging.getLogger(__name__)

STATE_CODECS: Final[Mapping[str, frozenset[Codec]]] = {
    "none": frozenset({Codec.NONE}),
    "planes": frozenset({Codec.NONE, Codec.PLANES}),
}

PLANES_BELOW_BYTES_PER_S: Final = 80e6  # Below, byte planes (ratio 1.2, 1 GB/s on one core) save time


def codec_for(allowed: frozenset[Codec], goodput_bytes_per_s: float) -> Codec:
    """Chooses the codec for sending state chunks over a link with this goodput (0: unknown)."""
    slow = 0 < goodput_bytes_per_s < PLANES_BELOW_BYTES_PER_S
    return Codec.PLANES if slow and Codec.PLANES in allowed else Codec.NONE


def may_come_as(tensor: TensorSpec, elements: int, allowed: frozenset[Codec]) -> bool:
    # An encoding longer than the raw chunk would not fit in the buffer.
    return (
        (tensor.shape, tensor.dtype) == ((elements,), DType.FLOAT32)
        and tensor.codec in allowed
        and (tensor.codec is Codec.NONE or tensor.byte_length < tensor.raw_bytes)
    )


SUFFIX: Final = ".partial-state"


class PartialState:
    """Vectors of a state being downloaded, filled on a separate thread. `folder` keeps chunks across restarts."""

    def __init__(self, hash_list: HashList, space: Space, folder: Path | None) -> None:
        self.parameters, self.momentum = self._vectors = space.spare()
        self._space, self._layout, self._folder = space, space.layout, folder
        self._digest, self._hashes = hash_list.version.digest, hash_list.hashes
        self._room: torch.Tensor | None = None
        self._file: KeptChunks | None = None
        self._placed: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "catching-up")

    async def take_over(self, known: Anchor | None) -> frozenset[int]:
        """Takes chunks from the anchor `known` and from an interrupted download's file. Returns their numbers."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._take_over, known)

    async def place(self, number: int, tensor: TensorSpec, data: memoryview) -> bool:
        """Decodes a chunk, checks its hash and stores it. Returns False if the chunk is wrong."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._place, number, tensor, data)

    async def close(self, *, complete: bool) -> None:
        finished = self._thread.submit(self._close, complete)
        self._thread.shutdown(wait=False)
        await asyncio.shield(asyncio.wrap_future(finished))

    def _take_over(self, known: Anchor | None) -> frozenset[int]:
        if self._folder is not None:
            self._file = KeptChunks(self._folder, self._digest, self._layout)
        # Shared arrays save memory as well as the download.
        if known is not None:
            self.parameters = self.parameters.sharing(known.parameters, self._shared(known, 0))
            self.momentum = self.momentum.sharing(known.momentum, self._shared(known, self._layout.chunks))
        for number in range(2 * self._layout.chunks):
            if number in self._placed:
                continue
            if known is not None and known.hashes[number] == self._hashes[number]:
                self._slot(number)[:] = known.chunk(number)
                self._placed.add(number)
            elif self._is_on_disk(number):
                self._placed.add(number)
        return frozenset(self._placed)

    def _shared(self, known: Anchor, first_number: int) -> set[int]:
        """Returns the fragments that the anchor `known` has too, by their hashes. We use its arrays for them."""
        same = set()
        for place, (first, end) in enumerate(self._layout.fragments):
            numbers = range(first_number + first, first_number + end)
            if all(known.hashes[number] == self._hashes[number] for number in numbers):
                same.add(place)
                self._placed.update(numbers)
        return same

    def _place(self, number: int, tensor: TensorSpec, encoded: memoryview) -> bool:
        data = encoded
        if tensor.codec is not Codec.NONE:
            if self._room is None:
                self._room = torch.empty(self._layout.chunk_elements)
            out = self._room[: tensor.elements]
            try:
                decode(tensor, encoded, out)
            except ProtocolViolation as error:
                log.info("chunk %d of a state cannot be decoded: %s", number, error)
                return False
            data = octets_of_tensor(out)
        if hash_of(data) != self._hashes[number]:
            return False
        # A chunk may arrive twice after a retry.
        if number not in self._placed:
            np.copyto(np.asarray(self._slot(number)), np.asarray(data))
            self._placed.add(number)
            # Without the file, the download continues in memory.
            if self._file is not None and not self._file.write(number, data):
                self._file = None
        return True

    def _close(self, complete: bool) -> None:
        if self._file is not None:
            self._file.close(remove=complete)
            self._file = None
        if not complete:
            self._space.give_back(*self._vectors)

    def _is_on_disk(self, number: int) -> bool:
        slot = self._slot(number)
        return self._file is not None and self._file.read(number, slot) and hash_of(slot) == self._hashes[number]

    def _slot(self, number: int) -> memoryview:
        return chunk_bytes(self._layout, self.parameters, self.momentum, number)


class KeptChunks:
    """File of a download's verified chunks: sparse, as large as the state. It is no longer used after a disk error."""

    def __init__(self, folder: Path, digest: bytes, layout: Layout) -> None:
        self._layout = layout
        self._path = folder / f"{digest.hex()[:32]}{SUFFIX}"
        self._file: io.FileIO | None = None
        self._is_new = True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Only the latest download is kept.
            for other in folder.glob(f"*{SUFFIX}"):
                if other != self._path:
                    other.unlink(missing_ok=True)
            self._is_new = not self._path.exists()
            self._path.touch(0o600)
            self._file = io.FileIO(self._path, "r+")
            self._file.truncate(8 * layout.elements)
        except OSError as error:
            self._give_up(error)

    def read(self, number: int, target: memoryview) -> bool:
        """Reads a chunk from the file, which may never have been written. Returns False if reading fails."""
        if self._file is None or self._is_new:
            return False
        try:
            self._file.seek(self._offset(number))
            return self._file.readinto(target) == target.nbytes
        except OSError as error:
            self._give_up(error)
            return False

    def write(self, number: int, data: memoryview) -> bool:
        if self._file is None:
            return False
        try:
            self._file.seek(self._offset(number))
            done = 0
            while done < data.nbytes:
                done += self._file.write(data[done:])
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def close(self, *, remove: bool) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if remove:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("could not remove %s: %s", self._path, error)

    def _offset(self, number: int) -> int:
        chunks = self._layout.chunks
        start = number * self._layout.chunk_elements
        if number >= chunks:
            start = self._layout.elements + (number - chunks) * self._layout.chunk_elements
        return 4 * start

    def _give_up(self, error: OSError) -> None:
        log.warning(
            "cannot keep the unfinished download in %s, so it would restart from zero: %s", self._path.parent, error
        )
        self.close(remove=True)


class Space(Protocol):
    """Allocator of the vectors into which a state is downloaded (`AnchorStore`, `FreshSpace`)."""

    @property
    def layout(self) -> Layout: ...

    def spare(self) -> StateVectors: ...

    def give_back(self, parameters: SharedVector, momentum: SharedVector) -> None: ...


class FreshSpace:
    """Allocator of vectors for a download on a node that has no AnchorStore."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def spare(self) -> StateVectors:
        return empty_vector(self.layout), empty_vector(self.layout)

    def give_back(self, parameters: SharedVector, momentum: SharedVector) -> None:
        return
