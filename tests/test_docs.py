"""The documents say what the code does: the generated part is fresh, and what they name exists."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from docs import generate_protocol
from node.observability.status import Status

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SOURCE = r"(?:swarm|protocol|node|proto|tests|benchmarks|docs)/[\w/]+\.(?:py|proto|md)"


@cache
def defined_in(file: str) -> frozenset[str]:
    """The names of all functions and classes; a walk comes to most files several times."""
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS))


def name_of(path: Path) -> str:
    return path.name


def test_the_reference_is_generated_from_the_contract() -> None:
    text = generate_protocol.TARGET.read_text()
    assert generate_protocol.rewritten(text) == text, "stale: run `make docs`"


def test_a_stale_reference_is_noticed() -> None:
    text = generate_protocol.TARGET.read_text()
    stale = text.replace("| `transfer` | uint32 |", "| `transfer` | uint64 |")
    assert stale != text
    assert generate_protocol.rewritten(stale) == text


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_and_tests_that_are_named_exist(document: Path) -> None:
    named = re.findall(rf"({SOURCE})(?:::(\w+))?", document.read_text())
    for file, test in named:
        assert (ROOT / file).is_file(), file
        assert not test or re.search(rf"def {test}\(", (ROOT / file).read_text()), f"{file}::{test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).is_file(), target


def test_the_keys_of_status_are_the_documented_ones() -> None:
    section = generate_protocol.TARGET.read_text().split("\n## Status\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    assert documented == {field.name for field in dataclasses.fields(Status)}
