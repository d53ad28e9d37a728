"""The router's file: beside its manifest, wherever that lies.

It stands alone because a router's bytes also come from peers, and what reads them need not know of files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from node.experts.router import MAX_ROUTER_BYTES, Router, check_fits, parse_router, read_router
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError

SUFFIX: Final = ".router"


def router_file(manifest_file: Path) -> Path:
    """The file of the router that a manifest names: `run.router` beside `run.toml`."""
    return manifest_file.with_suffix(SUFFIX)


def load_router(manifest_file: Path, manifest: Manifest) -> Router | None:
    """Reads the router beside a manifest; None when the manifest names none.

    Raises:
        ConfigError: the file is not there or cannot be read.
        StateError: as `read_router`.
    """
    return None if manifest.routing is None else read_router(_read(router_file(manifest_file)), manifest)


def load_trained_router(manifest_file: Path, manifest: Manifest) -> Router | None:
    """Reads the router beside an export's manifest: in a run whose router goes on learning, it is what that has become,
    and none that the manifest names. Errors as `load_router`."""
    if not manifest.reshards:
        return load_router(manifest_file, manifest)
    return check_fits(parse_router(_read(router_file(manifest_file))), manifest)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_ROUTER_BYTES + 1)  # one more than may be: it is refused
    except OSError as error:
        raise ConfigError(
            f"the run's router {path} cannot be read: {error.strerror}",
            hint="It lies beside the manifest where `skipstone new` wrote it; copy it along, or join by a link.",
        ) from None
