"""Which compute device a node uses, and why."""

from __future__ import annotations

import torch

from swarm.errors import ConfigError
from swarm.vocabulary import Reasoned


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
