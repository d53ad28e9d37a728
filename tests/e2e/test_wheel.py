"""The wheel in a clean environment, beside other packages called node, protocol and swarm; and the API of Python."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import skipstone
from node.observability.events import Event, InnerStep, NodeStatus, NodeSummary, Step
from protocol.identity.keys import Identity
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import ConfigError
from tests.e2e.small_run import small_run, write_text

ROOT = Path(__file__).parent.parent.parent
OTHERS = ("node", "protocol", "swarm")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def ran(*command: object, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [*map(str, command)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_wheel_runs_beside_packages_of_the_same_names_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = ran("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, tracked.split("\0")):  # a copy: building writes beside the sources
        if name.partition("/")[0] not in ("tests", "benchmarks") and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    ran(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=False)
    python, skipstone = tmp_path / "venv" / "bin" / "python", tmp_path / "venv" / "bin" / "skipstone"
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Our libraries take minutes to install. This line makes them visible, but not this checkout.
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    for other in OTHERS:
        (site / other).mkdir()
        (site / other / "__init__.py").write_text(f"WHOSE = 'theirs: {other}'\n")
    before = sorted(path.relative_to(site) for path in site.rglob("*"))
    ran(*pip, "--python", python, "install", "--no-deps", "--no-compile", wheel, cwd=tmp_path)
    lines = ran(skipstone, "up", "--steps", "2", "--peers", "5", "--json", cwd=tmp_path).splitlines()
    assert json.loads(lines[-1])["event"] == "summary"
    assert json.loads(lines[-1])["steps"] == 2
    theirs = "import node, protocol, swarm; print(node.WHOSE, protocol.WHOSE, swarm.WHOSE)"
    assert ran(python, "-c", theirs, cwd=tmp_path).count("theirs") == 3
    assert "home" in ran(skipstone, "wan", "--profiles", cwd=tmp_path)
    assert "stage-lost" in ran(skipstone, "chaos", "--list", cwd=tmp_path)
    ran(*pip, "--python", python, "uninstall", "--yes", "skipstone", cwd=tmp_path)
    left = [path for path in site.rglob("*") if "__pycache__" not in path.parts]
    assert sorted(path.relative_to(site) for path in left) == before


async def test_the_parts_of_the_command_line_serve_a_program(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    alone = skipstone.solo(manifest, steps=2, device="cpu")
    options = skipstone.LocalSwarmOptions(peers=2, steps=2, threads=1, device="cpu")
    ended = []
    async with skipstone.LocalSwarm(manifest, options) as swarm:
        async for event in swarm.events():
            ended += [event] if isinstance(event, NodeSummary) else []
            if swarm.progress.is_over:
                swarm.request_stop()
    assert len(ended) == 2
    assert swarm.progress.loss_last == pytest.approx(alone.loss_last, abs=0.2)
    with pytest.raises(AttributeError):
        skipstone.nothing  # noqa: B018


async def test_the_notebook_trains_watches_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in json.loads((ROOT / "docs" / "first-run.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), "first-run.ipynb", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waiting = eval(code, names)
            if waiting is not None:
                await waiting
    assert names["together"][-1].loss < names["alone"][0].loss - 1


async def first_of(events: AsyncIterator[Event], kind: type[Event]) -> Event:
    async for event in events:
        if isinstance(event, kind):
            return event
    raise AssertionError(f"the node ended without a {kind.__name__}")


async def test_nodes_run_within_blocks_of_a_program(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1))
    run, keys = tmp_path / "run.toml", (tmp_path / "one.key", tmp_path / "other.key")
    run.write_bytes(sign_manifest(manifest, Identity.create(keys[0])).text)
    assert skipstone.load(run) == manifest
    here: dict[str, Any] = {"device": "cpu", "listen": "127.0.0.1", "settings": tmp_path / "none.toml"}
    async with skipstone.join(run, identity_path=keys[0], stage="0", **here) as events:
        serving = await first_of(events, NodeStatus)
        while serving.state != "serving":
            serving = await first_of(events, NodeStatus)
        async with skipstone.join(serving.link, identity_path=keys[1], stage="1", **here) as others:
            await first_of(others, InnerStep)
            await first_of(events, Step)
    with pytest.raises(ConfigError, match="stage 17"):
        async with skipstone.join(run, identity_path=keys[0], stage="17", **here) as events:
            assert [each async for each in events] == []
