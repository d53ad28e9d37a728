"""Only code of ours runs, and no secret of this machine's goes where it is not needed."""

import ast
import asyncio
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from node.local_swarm.setup import LocalSetup, LocalSwarmOptions
from protocol.dht.child import running_child
from protocol.generated import dht_process_pb2
from protocol.identity.keys import Identity
from protocol.libp2p.child_process import child_environment, with_packages
from tests.kit.waiting import until
from tests.node.small_manifest import small_manifest
from tests.protocol.dht.running import RUN, Marked, needs_proc

ROOT = Path(__file__).parent.parent.parent
ISOLATING = {"-P", "-I"}
SECRET = "HF_TOKEN"

HOSTILE = """
import os
with open(os.environ["SKIPSTONE_TEST_HOSTILE"], "a") as file:
    file.write("ran")
"""


def dht_child() -> AbstractAsyncContextManager[object]:
    own = Identity.generate()
    start = dht_process_pb2.DhtStart(host="127.0.0.1", peer=own.peer, run=RUN, experts=(1, 1), timeout_s=20.0)
    return running_child(start, own)


def starts_of_interpreters(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line of each `sys.executable` that something follows, and what follows it at once."""
    for node in ast.walk(tree):
        words = node.args if isinstance(node, ast.Call) else getattr(node, "elts", None)
        if not isinstance(node, ast.Call | ast.List | ast.Tuple) or words is None:
            continue
        for word, following in itertools.pairwise([*words, ast.Constant("")]):
            if ast.unparse(word) == "sys.executable":
                yield word.lineno, str(following.value) if isinstance(following, ast.Constant) else ""


@pytest.mark.parametrize("folder", ["node", "protocol", "docker"])
def test_no_interpreter_looks_for_modules_where_the_user_stands(folder: str) -> None:
    found, named = 0, 0
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text()
        named += text.count("sys.executable")
        for line, option in starts_of_interpreters(ast.parse(text)):
            found += 1
            assert option in ISOLATING, f"{path}:{line}"
    assert found == named, "sys.executable is used in a way that this test does not understand"
    assert found or folder == "docker"


def test_the_rule_itself_can_fail() -> None:
    tree = ast.parse('run([sys.executable, "-m", "skipstone"]); start(sys.executable, "-P", "-m"); (sys.executable,)')
    assert sorted(option for _, option in starts_of_interpreters(tree)) == ["", "-P", "-m"]


@pytest.mark.e2e
async def test_a_module_in_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "shutil.py").write_text(HOSTILE)
    monkeypatch.setenv("SKIPSTONE_TEST_HOSTILE", str(ran))
    monkeypatch.chdir(tmp_path)
    await (await asyncio.create_subprocess_exec(sys.executable, "-c", "import shutil")).wait()
    assert ran.read_text() == "ran", "the trap works"
    ran.unlink()
    async with dht_child():
        assert not ran.exists()


@needs_proc
@pytest.mark.e2e
async def test_no_secret_reaches_the_processes_that_strangers_speak_to(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Marked(monkeypatch)
    monkeypatch.setenv(SECRET, "hf_canary")
    async with dht_child():
        await until(lambda: bool(marked.network_daemons()))
        for process in marked.processes():
            assert b"hf_canary" not in Path(f"/proc/{process}/environ").read_bytes()


def test_a_child_is_told_what_it_needs() -> None:
    needed = {"PATH": "/usr/bin", "HOME": "/home/u", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "2"}
    needed |= {"CUDA_VISIBLE_DEVICES": "0", "SKIPSTONE_DEBUG": "1"}
    secret = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "SSH_AUTH_SOCK")
    harmful = ("LD_PRELOAD", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONHOME", "BASH_ENV")
    told = child_environment(needed | dict.fromkeys((*secret, *harmful), "canary"), GOMEMLIMIT="1GiB")
    assert told == needed | {"GOMEMLIMIT": "1GiB"}


def test_no_list_of_folders_leads_to_where_the_user_stands() -> None:
    """An empty entry does: `PYTHONPATH=$PYTHONPATH:/mine` makes one."""
    lists = os.pathsep.join(("", "/mine", ".", "relative"))
    told = with_packages({"PYTHONPATH": lists, "PATH": lists, "LD_LIBRARY_PATH": os.pathsep}, "/packages")
    assert told == {"PYTHONPATH": os.pathsep.join(("/packages", "/mine")), "PATH": "/mine"}


def test_the_nodes_of_a_local_swarm_get_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "hf_canary")
    setup = LocalSetup(small_manifest(), LocalSwarmOptions(peers=3))
    try:
        assert "hf_canary" not in setup.environment().values()
    finally:
        setup.remove()
