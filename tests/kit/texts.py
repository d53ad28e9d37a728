"""Sources of text files for tests."""

from pathlib import Path

from node.data.sources import FileSource, piece_bytes, source_at


def files_at(path: Path) -> FileSource:
    """Opens one file or a folder as plain text, whatever is in it. Raises ConfigError."""
    return source_at(path, lambda listing: FileSource(listing, piece_bytes(listing)))
