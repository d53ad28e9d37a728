"""README's shell blocks are run as they are, each by a person with an empty HOME, in an empty folder."""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BLOCKS = [
    block.splitlines() for block in re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
]
LEFT_OUT = {"make swarm": "it installs packages from an index on the internet"}
"""First line of a block that is not run, with the reason."""
AWAITED = {"skipstone join run.toml": r"^  skipstone join (skipstone:\S+)", "skipstone join LINK": r"serving module ()"}
"""What the last command of a block prints before it is stopped; another one must end by itself."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def typed(block: list[str], folder: Path) -> subprocess.Popen[str]:
    """Runs the block in bash on the loopback interface, in a process group that Ctrl-C ends."""
    command = folder.parent / "bin" / "skipstone"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m skipstone "$@"\n')
    command.chmod(0o755)
    loopback = {"SKIPSTONE_LISTEN": "127.0.0.1", "SKIPSTONE_ADVERTISE": "127.0.0.1", "SKIPSTONE_REACH": "direct"}
    own = {"HOME": str(folder.parent), "PYTHONPATH": str(ROOT), "PATH": f"{command.parent}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", "-ec", "\n".join(block)],
        cwd=folder,
        env={**own, **loopback, "SKIPSTONE_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def ended(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    process.wait()


def test_the_blocks_of_the_readme_do_what_it_says(tmp_path: Path) -> None:
    running, link = [], ""
    with ExitStack() as stack:
        for number, block in enumerate(block for block in BLOCKS if block[0] not in LEFT_OUT):
            folder = tmp_path / str(number) / "folder"
            folder.mkdir(parents=True)
            (folder / "LINK").write_text(link)  # in the README, LINK stands for the friend's link
            process = stack.enter_context(typed(block, folder))
            stack.callback(ended, process, signal.SIGKILL)
            if block[-1] not in AWAITED:
                said, _ = process.communicate()
                assert process.returncode == 0, said
                continue
            seen = []
            for line in process.stdout or ():
                seen.append(line)
                if found := re.search(AWAITED[block[-1]], line):
                    link = link or found[1]
                    break
            else:
                pytest.fail("".join(seen))
            running.append(process)
        assert link
        for process in reversed(running):
            os.killpg(process.pid, signal.SIGINT)
            said, _ = process.communicate()
            assert "left in good order: " in said
            assert process.returncode == 0, said
