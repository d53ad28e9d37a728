"""Files that are written whole or not at all."""

import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically, or leaves the old one. Raises OSError."""
    # An unguessable name: in a shared folder, another user could plant a symlink at a known one.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with partial.open("xb") as file:
        file.write(data)
    try:
        os.replace(partial, path)
    except OSError:
        partial.unlink()
        raise
