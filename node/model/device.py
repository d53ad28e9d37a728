"""Choice of the compute device, and handling of denormal numbers.

Denormal numbers slow a CPU down up to fifty times, so compute threads flush them to zero. Results that replicas must
agree on bit for bit are computed with gradual underflow instead.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from torch import Tensor

from node.model.machine_limits import usable_cores
from swarm.vocabulary.errors import ConfigError, OutOfMemory
from swarm.vocabulary.types import Reasoned

# Out-of-memory messages of torch, oneDNN and C++ on the CPU. All three raise a bare RuntimeError.
_NO_MEMORY: Final = re.compile(
    "can't allocate memory|not enough memory|bad_alloc|could not create a (memory|primitive)", re.IGNORECASE
)

MOST_DEVICES: Final = 16

log = logging.getLogger(__name__)


def use_cores(threads: int | None = None) -> None:
    """Limits the calling thread to `threads` OpenMP threads, or to the cores that this process may use."""
    torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))


@contextmanager
def device_errors() -> Iterator[None]:
    """Converts out-of-memory errors of the compute device to OutOfMemory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # includes torch.OutOfMemoryError
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _NO_MEMORY.search(str(error)):
            raise
        raise OutOfMemory(
            f"the device is out of memory: {str(error)[:200]}", hint="Start with a smaller --memory or fewer --slots."
        ) from None


def copied(tensor: Tensor) -> Tensor:
    """Copies the tensor to float32 on the CPU, so that another thread may read the copy while the tensor changes."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def flush_denormals() -> None:
    """Makes this thread and all threads it starts treat denormal numbers as zero, in torch and numpy."""
    if not torch.set_flush_denormal(True):
        log.info("this processor cannot flush denormal numbers, so peers that send them may slow this node down")


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Calls `flush_denormals` for a block and restores the thread's setting afterwards."""
    with gradual_underflow():
        flush_denormals()
        yield


@contextmanager
def gradual_underflow() -> Iterator[None]:
    """Computes a block with IEEE 754 denormal numbers on this thread, which gives the same bits on every machine."""
    were_flushed = bool(np.multiply(np.float32(1e-30), np.float32(1e-10)) == 0)  # denormal unless flushed
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(were_flushed)


def choose_device(wish: str) -> Reasoned[torch.device]:
    """Chooses `auto` or a torch device (`cpu`, `cuda:1`, `mps`). Raises ConfigError if it is not available."""
    if wish != "auto":
        return Reasoned(_named(wish), "by option")
    if torch.cuda.is_available():
        return Reasoned(torch.device("cuda"), f"auto: {torch.cuda.get_device_name()}")
    if torch.backends.mps.is_available():
        return Reasoned(torch.device("mps"), "auto: Apple GPU")
    return Reasoned(torch.device("cpu"), "auto: this build of torch finds no GPU")


def choose_devices(wish: str) -> Reasoned[tuple[torch.device, ...]]:
    """Chooses one device, or several of one kind (`cuda:0,cuda:1`). The first holds the module. Raises ConfigError."""
    names = [name.strip() for name in wish.split(",")]
    if len(names) == 1:
        only = choose_device(wish)
        return Reasoned((only.value,), only.reason)
    if len(names) > MOST_DEVICES:
        raise ConfigError(f"--device names {len(names)} devices", hint=f"Name at most {MOST_DEVICES}.")
    named = [_named(name) for name in names]
    # `cuda` and `cuda:0` are the same device.
    devices = tuple(torch.device("cuda", each.index or 0) if each.type == "cuda" else each for each in named)
    if len({device.type for device in devices}) > 1:
        raise ConfigError(f"devices of different kinds cannot share a module: {wish}", hint="Start one node per kind.")
    if devices[0].type != "cpu" and len(set(devices)) < len(devices):
        raise ConfigError(f"a device is named twice: {wish}", hint="Name each GPU once, as in cuda:0,cuda:1.")
    return Reasoned(devices, f"by option: {len(devices)} devices share each microbatch")


def _named(wish: str) -> torch.device:
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise ConfigError(f"device {wish!r} is unknown", hint="Use auto, cpu, cuda, cuda:N or mps.") from None
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, False):
        raise ConfigError(f"device {wish!r} is not available", hint="Use --device auto, or a build of torch for it.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {wish!r} is not available: there are {torch.cuda.device_count()} CUDA devices")
    return device
