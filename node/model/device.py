"""The choice of a node's compute device, and how its processor treats denormal numbers.

Denormal numbers make a CPU visit up to fifty times slower, so compute threads flush them to zero. Results that replicas
must agree on are computed with gradual underflow.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from swarm.vocabulary.errors import ConfigError, OutOfMemory
from swarm.vocabulary.types import Reasoned

_NO_MEMORY: Final = re.compile(
    "can't allocate memory|not enough memory|bad_alloc|could not create a (memory|primitive)", re.IGNORECASE
)
"""Out of memory messages of torch, oneDNN and C++ on the CPU, which raise a bare RuntimeError."""

MOST_DEVICES: Final = 16

log = logging.getLogger(__name__)


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns the compute device's out of memory errors into OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError, too
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        raise OutOfMemory(
            f"the compute device is out of memory: {str(error)[:200]}",
            hint="Start the node with a smaller --memory or fewer --slots.",
        ) from None


def bytes_of_tensor(tensor: Tensor) -> memoryview:
    """The bytes of the elements in row-major order. On the CPU they share the tensor's memory."""
    plain = tensor.detach().to("cpu").contiguous()
    return plain.view(torch.uint8).numpy().reshape(-1).data


def copied(tensor: Tensor) -> Tensor:
    """A float32 copy on the CPU that shares no memory with the tensor, so that another thread may read it meanwhile."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def flush_denormals() -> None:
    """Makes this thread, and every one that it starts, take denormal numbers for zero (numpy's arithmetic too)."""
    if not torch.set_flush_denormal(True):
        log.info(
            "this processor cannot flush denormal numbers; if they are slow here, peers can make microbatches slow"
        )


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Flushes denormals, as `flush_denormals`, within a block on a thread that has other things to do afterwards."""
    before = _are_flushed()
    flush_denormals()
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def gradual_underflow() -> Iterator[None]:
    """Computes this thread's block with IEEE 754's denormal numbers, as every machine can."""
    before = _are_flushed()
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _are_flushed() -> bool:
    return bool(np.multiply(np.float32(1e-30), np.float32(1e-10)) == 0)


def choose_device(wish: str) -> Reasoned[torch.device]:
    """Chooses the device: `auto`, or a torch name (`cpu`, `cuda:1`, `mps`). Raises ConfigError if it is missing."""
    if wish != "auto":
        return Reasoned(_named(wish), "asked for")
    if torch.cuda.is_available():
        return Reasoned(torch.device("cuda"), f"auto: {torch.cuda.get_device_name()}")
    if torch.backends.mps.is_available():
        return Reasoned(torch.device("mps"), "auto: Apple GPU")
    return Reasoned(torch.device("cpu"), "auto: no GPU that this build of torch can use")


def choose_devices(wish: str) -> Reasoned[tuple[torch.device, ...]]:
    """Chooses devices for `wish`: one, or names of one kind separated by commas. The first holds the module.

    Raises:
        ConfigError: they are missing, of several kinds, the same GPU twice, or too many.
    """
    names = [name.strip() for name in wish.split(",")]
    if len(names) == 1:
        only = choose_device(wish)
        return Reasoned((only.value,), only.reason)
    if len(names) > MOST_DEVICES:
        raise ConfigError(f"{len(names)} devices were asked for", hint=f"A node computes with {MOST_DEVICES} at most.")
    devices = tuple(_numbered(_named(name)) for name in names)
    if len({device.type for device in devices}) > 1:
        raise ConfigError(
            f"devices of several kinds cannot share a module: {wish}", hint="Start a node of its own for each kind."
        )
    if devices[0].type != "cpu" and len(set(devices)) < len(devices):
        raise ConfigError(f"a device is named twice: {wish}", hint="Name each GPU once, as in cuda:0,cuda:1.")
    return Reasoned(devices, f"{len(devices)} asked for; they share each microbatch")


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _named(wish: str) -> torch.device:
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise ConfigError(f"device {wish!r} is unknown", hint="Use auto, cpu, cuda, cuda:N or mps.") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, False):
        raise ConfigError(
            f"device {wish!r} is not there", hint="Use --device auto, or install a build of torch for it."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {wish!r} is not there: this machine has {torch.cuda.device_count()} of them")
    return device
