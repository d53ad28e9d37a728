"""The version of Skipstone that runs here."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str:
    """The version of the installed package; `(not installed)` when it runs from its sources alone."""
    try:
        return metadata.version("skipstone")
    except metadata.PackageNotFoundError:
        return "(not installed)"
