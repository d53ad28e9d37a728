"""The check of versions: do Python and the libraries fit what the package asks for?"""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from node.doctor.finding import Finding, Level

LIBRARIES: Final = ("torch", "hivemind", "grpcio")
"""Those whose versions decide whether a node works. pip looks after the rest."""

_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*([^;]*)")
_CLAUSE: Final = re.compile(r"(==|>=|<=|!=|<|>|~=)\s*([0-9][0-9.]*?)(\.\*)?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The required versions of pyproject.toml, as specifiers such as `>=3.11` or `==2.13.*`."""

    python: str
    libraries: dict[str, str]


def versions(wanted: Wanted, python: str, installed: Callable[[str], str | None]) -> list[Finding]:
    """The findings, one for Python and each of LIBRARIES. `installed` gives a library's version, None when it is not
    there.
    """
    findings = [
        _compared("python", python, wanted.python, f"Install Python {wanted.python} and make the environment anew.")
    ]
    for name in LIBRARIES:
        specifier = wanted.libraries.get(name, "")
        fix = f"pip install '{name}{specifier}'"
        version = installed(name)
        if version is None:
            findings.append(Finding(name, Level.FAIL, f"is not installed; {specifier or 'any version'} is wanted", fix))
        else:
            findings.append(_compared(name, version, specifier, fix))
    return findings


def look_at_versions() -> Sequence[Finding]:
    """Checks the versions in this process's Python."""
    return versions(wanted_here(), platform.python_version(), _installed)


def wanted_here() -> Wanted:
    """The required versions as the installed package says, else pyproject.toml beside the sources."""
    try:
        about = metadata.metadata("skipstone")
        return _wanted(about["Requires-Python"] or "", about.get_all("Requires-Dist") or [])
    except metadata.PackageNotFoundError:
        file = Path(__file__).resolve().parents[3] / "pyproject.toml"
        project = tomllib.loads(file.read_text())["project"]
        return _wanted(project["requires-python"], project["dependencies"])


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version fits, as far as the specifiers in pyproject.toml need: release numbers only (PEP 440 without
    the rest)."""
    here = _numbers(version)
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            return False
        operator, number, any_after = match.groups()
        if not _holds(here, operator, _numbers(number), prefix=any_after is not None):
            return False
    return True


def _holds(here: tuple[int, ...], operator: str, there: tuple[int, ...], *, prefix: bool) -> bool:
    length = max(len(here), len(there))
    a, b = (numbers + (0,) * (length - len(numbers)) for numbers in (here, there))
    equal = here[: len(there)] == there if prefix else a == b
    match operator:
        case "==":
            return equal
        case "!=":
            return not equal
        case "~=":
            return a >= b and here[: len(there) - 1] == there[:-1]
        case ">=":
            return a >= b
        case "<=":
            return a <= b
        case ">":
            return a > b
        case _:
            return a < b


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0` of `2.13.0+cpu` or `2.13.0rc1`."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _wanted(python: str, requirements: Sequence[str]) -> Wanted:
    found = [match.groups() for match in map(_REQUIREMENT.match, requirements) if match is not None]
    extras = re.compile(r"extra\s*==")
    base = [pair for pair, text in zip(found, requirements, strict=True) if not extras.search(text)]
    return Wanted(python, {name: specifier.strip(" ()") for name, specifier in base if name in LIBRARIES})


def _compared(name: str, version: str, specifier: str, fix: str) -> Finding:
    if satisfies(version, specifier):
        return Finding(name, Level.OK, f"{version} ({specifier or 'any version'} is wanted)")
    return Finding(name, Level.FAIL, f"{version}, but {specifier} is wanted", fix)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
