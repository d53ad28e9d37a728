"""Which compute device a node uses, and why; and how its processor treats numbers that are next to nothing.

Numbers below 1.2e-38 (denormal ones) take most processors tens of times as long, and pass every check: inputs and gradients of 1e-40 make one
visit fifty times as dear. Training needs none of them, so the threads that compute for peers take them for zero. The mode belongs to a thread, and to those that it starts
later, as torch's workers are. Graphics processors have no such cost.

What replicas must agree on bit for bit is computed without: processors differ in what exactly they flush, and some cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from swarm.errors import ConfigError
from swarm.vocabulary import Reasoned

log = logging.getLogger(__name__)


def flush_denormals() -> None:
    """From now on this thread, and every one that it starts, takes denormal numbers for zero (numpy's arithmetic too)."""
    if not torch.set_flush_denormal(True):
        log.info(
            "this processor cannot flush denormal numbers; if they are slow here, peers can make microbatches slow"
        )


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """`flush_denormals` for a block on a thread that has other things to do afterwards."""
    before = _are_flushed()
    flush_denormals()
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextmanager
def gradual_underflow() -> Iterator[None]:
    """Inside the block this thread rounds as IEEE 754 says, as every machine can. Slow where there are denormal numbers."""
    before = _are_flushed()
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _are_flushed() -> bool:
    return bool(np.multiply(np.float32(1e-30), np.float32(1e-10)) == 0)


def choose_device(wish: str) -> Reasoned[torch.device]:
    """The device for `wish`: `auto`, or a name that torch knows (`cpu`, `cuda`, `cuda:1`, `mps`).

    Raises:
        ConfigError: it is no device's name, or this machine or this build of torch has none such.
    """
    if wish != "auto":
        return Reasoned(_named(wish), "asked for")
    if torch.cuda.is_available():
        return Reasoned(torch.device("cuda"), f"auto: {torch.cuda.get_device_name()}")
    if torch.backends.mps.is_available():
        return Reasoned(torch.device("mps"), "auto: Apple GPU")
    return Reasoned(torch.device("cpu"), "auto: no GPU that this build of torch can use")


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
