"""The documents: what they name exists, commands and options are real, each stays small."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from lab.commands import app as laboratory
from lab.scenario import known_scenarios
from node.__main__ import app
from node.observability.status import Status
from swarm.vocabulary import errors

ROOT = Path(__file__).parent.parent
KB = 1024
LARGEST = {
    "README.md": 5 * KB,
    "CONTRIBUTING.md": 7 * KB,
    "docs/join.md": 8 * KB,
    "docs/node.md": 8 * KB,
    "docs/run.md": 12 * KB,
    "docs/how-it-works.md": 15 * KB,
    "docs/security.md": 12 * KB,
    "docs/protocol.md": 20 * KB,
    "docs/lab.md": 8 * KB,
    "docs/results.md": 12 * KB,
}
ALL_TOGETHER = 110 * KB
FOLDERS = r"(?:swarm|protocol|node|lab|proto|tests|benchmarks|docs|docker)"
SECURITY = ROOT / "tests" / "security"


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def code_in(text: str) -> Iterator[str]:
    """Yields lines of code blocks, continued ones joined, and inline code."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors_of(text: str) -> set[str]:
    """Returns the anchors that GitHub gives to headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def options() -> dict[str, set[str]]:
    """The options of each command."""
    commands: dict[str, Any] = vars(get_command(app))["commands"] | vars(get_command(laboratory))["commands"]
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands.items()
    }


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("document", LARGEST)
def test_a_document_is_small(document: str) -> None:
    assert len(text_of(document).encode()) <= LARGEST[document]


def test_all_documents_are_listed_and_small_together() -> None:
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} <= set(LARGEST)
    assert sum(len(text_of(document).encode()) for document in LARGEST) <= ALL_TOGETHER


@pytest.mark.parametrize("document", LARGEST)
def test_files_and_tests_in_a_document_exist(document: str) -> None:
    for name in re.findall(r"`([^`\n]+)`", text_of(document)):
        if match := re.fullmatch(rf"({FOLDERS}/[\w./-]*)(?:::(\w+))?", name):
            assert (ROOT / match[1]).exists(), name
            assert match[2] is None or f"def {match[2]}(" in text_of(match[1]), name
        elif re.fullmatch(r"test_\w+\.py", name):
            assert (SECURITY / name).is_file(), name


@pytest.mark.parametrize("document", LARGEST)
def test_links_and_anchors_in_a_document_exist(document: str) -> None:
    here = ROOT / document
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text_of(document)):
        place, _, anchor = target.partition("#")
        path = (here.parent / place) if place else here
        assert path.is_file(), target
        assert not anchor or anchor in anchors_of(path.read_text()), target


@pytest.mark.parametrize("document", LARGEST)
def test_commands_and_options_in_a_document_exist(document: str) -> None:
    anywhere = set().union(*options().values())
    for line in code_in(text_of(document)):
        command = re.search(r"(?<![\w/-])skipstone ([a-z]+)\b(.*)", line)
        if command is not None:
            assert command[1] in options(), line
            assert {*re.findall(r"(?<!\S)--[a-z-]+", command[2].partition("#")[0])} <= options()[command[1]], line
        elif line.startswith("--"):
            assert line.split()[0].split("=")[0] in anywhere | {"--json", "--out"}, line
        for target in re.findall(r"^make ([a-z-]+)", line):
            assert target in targets(), line
        if command is not None and command[1] == "chaos":
            named = re.findall(r"(?<!\S)[a-z][\w-]+", command[2].partition(" --")[0].partition("#")[0])
            assert set(named) <= {*known_scenarios(), "all"}, line


def test_every_command_is_documented() -> None:
    code = "\n".join(line for document in LARGEST for line in code_in(text_of(document)))
    assert {name for name in options() if not re.search(rf"skipstone {name}\b", code)} == set()


def test_documents_that_the_code_names_exist() -> None:
    files = [path for folder in ("node", "swarm", "protocol", "lab", "proto", "docker") for path in source_of(folder)]
    for path in (*files, ROOT / "Makefile"):
        for name in re.findall(r"docs/[\w-]+\.\w+", path.read_text()):
            assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)}: {name}"


def source_of(folder: str) -> Iterator[Path]:
    suffixes = {".py", ".proto", ".toml", ".yml"}
    return (path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes or path.name == "Dockerfile")


def test_exit_codes_are_documented() -> None:
    section = text_of("docs/join.md").split("\n## Exit codes\n")[1]
    listed = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", section, re.M) for code in row.split(",")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {kind.exit_code for kind in kinds if issubclass(kind, errors.SkipstoneError)} <= listed


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-P", "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "run/#text" in (tmp_path / "index.html").read_text()


def test_the_keys_of_status_are_documented() -> None:
    section = text_of("docs/protocol.md").split("\n## Status\n")[1]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    assert documented == {field.name for field in dataclasses.fields(Status)}


def test_the_checks_of_documents_can_fail() -> None:
    text = "# A b-c, d!\n```\nskipstone join \\\n--yes\n# no heading\n```\n`x`"
    assert anchors_of(text) == {"a-b-c-d"}
    assert list(code_in(text)) == ["skipstone join  --yes", "# no heading", "x"]
