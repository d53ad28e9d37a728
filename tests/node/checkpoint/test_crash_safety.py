"""Whatever step of a write a process dies or fails at: what was there is still there, or the new one is, whole."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.checkpoint.folder import CheckpointFolder, load_newest, save_state
from node.checkpoint.state import Counters, ReplicaState
from node.model.optimizer import InnerState
from swarm.vocabulary.errors import ResourceExhausted, StateError
from tests.node.checkpoint.saved_states import ONE, PEER, Countdown, SteppedStorage, die, folder_at, same, state_of

ROOT = Path(__file__).parent.parent.parent.parent


def steps_of_a_save(path: Path) -> list[str]:
    """Of the third save in a folder, which has something to remove as well."""
    countdown = Countdown(-1, die)
    for value in (1.0, 2.0):
        save_state(folder_at(path), PEER, ONE, state_of(value))
    save_state(folder_at(path, SteppedStorage(countdown)), PEER, ONE, state_of(3.0))
    return countdown.steps


def child(arguments: list[str]) -> None:
    """Saves 3.0, and dies at the given step."""
    path, at = arguments
    save_state(folder_at(Path(path), SteppedStorage(Countdown(int(at), die))), PEER, ONE, state_of(3.0))


def test_a_process_killed_at_any_step_of_a_save(tmp_path: Path) -> None:
    steps = steps_of_a_save(tmp_path / "counted")
    assert steps.count("rename") == 2
    assert steps.count("remove") == 2
    shutil.copytree(tmp_path / "counted", tmp_path / "before")
    # One process forks for every step: importing torch for each would take minutes.
    code = (
        "import sys; from tests.node.checkpoint.test_crash_safety import die_at_every_step; "
        "die_at_every_step(sys.argv[1:])"
    )
    folders = [str(tmp_path / f"at-{step}") for step in range(1, len(steps) + 1)]
    for folder in folders:
        for value in (1.0, 2.0):
            save_state(folder_at(Path(folder)), PEER, ONE, state_of(value))
    subprocess.run([sys.executable, "-c", code, *folders], cwd=ROOT, timeout=100, check=True)
    outcomes = []
    for folder in map(Path, folders):
        found = load_newest(folder_at(folder), PEER)
        assert found is not None
        assert found.problems == ()
        assert same(found.state, state_of(2.0)) or same(found.state, state_of(3.0))
        outcomes.append(same(found.state, state_of(3.0)))
        save_state(folder_at(folder), PEER, ONE, state_of(4.0))  # and it goes on from there
        again = load_newest(folder_at(folder), PEER)
        assert again is not None
        assert same(again.state, state_of(4.0))
        assert len(list((folder / PEER).iterdir())) == 4, "what the crash left behind is gone"
    assert outcomes == sorted(outcomes), "once there, a snapshot stays"
    assert {True, False} == set(outcomes)


def die_at_every_step(folders: list[str]) -> None:
    """In a process of its own: a child of it dies at each step, in a folder of its own."""
    for at, folder in enumerate(folders, start=1):
        pid = os.fork()
        if pid == 0:
            child([folder, str(at)])
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise AssertionError(f"the child that was to die at step {at} did not: {status}")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_step(tmp_path: Path, number: int) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for at, step in enumerate(steps_of_a_save(tmp_path / "counted"), start=1):
        folder = tmp_path / f"at-{at}"
        for value in (1.0, 2.0):
            save_state(folder_at(folder), PEER, ONE, state_of(value))
        storage = SteppedStorage(Countdown(at, fail))
        expected = state_of(3.0)
        if step == "remove":  # the snapshot is whole, only an old file stays a while longer
            save_state(folder_at(folder, storage), PEER, ONE, expected)
        else:
            with pytest.raises(
                ResourceExhausted if number == errno.ENOSPC else StateError, match="could not be written"
            ):
                save_state(folder_at(folder, storage), PEER, ONE, expected)
        found = load_newest(folder_at(folder), PEER)
        assert found is not None
        assert found.problems == ()
        assert same(found.state, expected) or (step != "remove" and same(found.state, state_of(2.0)))
        assert not list((folder / PEER).glob(".*")), f"a failed attempt leaves no rest (step {at}, {step})"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here; the test with injected errors covers the same")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def of_size(numbers: int) -> ReplicaState:
    return ReplicaState({"w": torch.ones(numbers)}, InnerState(1, {}), Counters(1, 1, 1, 1))


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    folder: CheckpointFolder = folder_at(small_disk / "checkpoint")
    save_state(folder, PEER, ONE, of_size(20_000))
    for _ in range(3):
        with pytest.raises(ResourceExhausted, match="No space left"):
            save_state(folder, PEER, ONE, of_size(60_000))
    found = load_newest(folder, PEER)
    assert found is not None
    assert found.state.local["w"].numel() == 20_000
    save_state(folder, PEER, ONE, of_size(20_001))
