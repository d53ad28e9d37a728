"""Version of Skipstone that runs here."""

from importlib import metadata


def installed_version() -> str:
    """Returns the version of the installed package; `(not installed)` in a checkout without installation."""
    try:
        return metadata.version("skipstone")
    except metadata.PackageNotFoundError:
        return "(not installed)"
