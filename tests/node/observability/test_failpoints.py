"""Crash points kill the process that was asked to die there, at the right time, and nobody else."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.observability.failpoints import POINTS, VARIABLE, crash_at
from swarm.pipeline.custody_events import Work
from swarm.vocabulary.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent.parent
PROGRAM = """
from node.observability.failpoints import crash_point
for turn in range(3):
    crash_point("sent")
    crash_point("staged")
    print(turn, flush=True)
"""


def run(value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(VARIABLE, None)
    if value is not None:
        environment[VARIABLE] = value
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)


def test_without_the_variable_nothing_happens() -> None:
    ended = run(None)
    assert (ended.returncode, ended.stdout) == (0, "0\n1\n2\n")
    assert run("").returncode == 0


def test_a_process_dies_at_the_nth_time_and_not_before() -> None:
    ended = run(crash_at("staged", 2))
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "0\n")


@pytest.mark.parametrize("value", ["nowhere:1", "sent", "sent:0", "sent:x", "sent:-1"])
def test_a_point_that_is_none_is_no_silent_survival(value: str) -> None:
    ended = run(value)
    assert ended.returncode == 1
    assert "ConfigError" in ended.stderr


def test_an_unknown_point_is_named() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        crash_at("nowhere", 1)


def test_every_point_is_somewhere_and_every_place_has_a_known_name() -> None:
    found = set[str]()
    for path in (ROOT / "node").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "crash_point":
                name = ast.unparse(call.args[0])
                by_work = re.fullmatch(r"f'(before|after) \{action\.work\.name\.lower\(\)\}'", name)
                if by_work:
                    found |= {f"{by_work[1]} {work.name.lower()}" for work in Work}
                else:
                    found.add(ast.literal_eval(name))
    assert found == POINTS.keys()
