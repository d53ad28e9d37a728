"""Imports hivemind's DHT without the rest of hivemind, which would import torch (1.6 CPU-seconds, 280 MB)."""

import importlib
import importlib.util
import sys
from types import ModuleType

from swarm.vocabulary.errors import ConfigError

_PACKAGES = ("hivemind", "hivemind.utils", "hivemind.dht")
_GATHERED_BY_UTILS = {
    "hivemind.utils.logging": ("get_logger",),
    "hivemind.utils.serializer": ("MSGPackSerializer", "SerializerBase"),
    "hivemind.utils.timed_storage": (
        "DHTExpiration",
        "MAX_DHT_TIME_DISCREPANCY_SECONDS",
        "TimedStorage",
        "ValueWithExpiration",
        "get_dht_time",
    ),
}


def install() -> None:
    """Prepares a cheap import of `hivemind.dht.node`, unless hivemind is already imported. Raises ConfigError."""
    if "hivemind" in sys.modules:
        return
    found = importlib.util.find_spec("hivemind")
    if found is None or not found.submodule_search_locations:
        raise ConfigError("hivemind is not installed", hint="Install Skipstone's dependencies again.")
    root = found.submodule_search_locations[0]
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [root + name.removeprefix("hivemind").replace(".", "/")]
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)
    utils = sys.modules["hivemind.utils"]
    for module_name, names in _GATHERED_BY_UTILS.items():
        module = importlib.import_module(module_name)
        for name in names:
            setattr(utils, name, getattr(module, name))
