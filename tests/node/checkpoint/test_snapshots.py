"""Snapshots: what is read is what was written, or it is refused with the file's name and the one before is taken."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from node.checkpoint.folder import (
    CheckpointFolder,
    gather_modules,
    header_bytes,
    load_newest,
    parse_header,
    read_manifest,
    save_state,
)
from node.checkpoint.state import Counters, ReplicaState
from node.model.optimizer import InnerState
from swarm.vocabulary.errors import ConfigError, CorruptSnapshot, ResourceExhausted, StateError
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId
from tests.node.checkpoint.saved_states import (
    CURSOR,
    ONE,
    OTHER,
    PEER,
    Countdown,
    SteppedStorage,
    die,
    folder_at,
    same,
    state_of,
    version,
)
from tests.node.small_manifest import small_manifest

NEW, OLD = state_of(2.0, anchor=version(3), cursor=CURSOR), state_of(1.0)


@pytest.mark.parametrize("state", [OLD, NEW, state_of(3.0, anchor=version(1)), state_of(4.0, cursor=CURSOR)])
def test_a_state_comes_back_as_it_was(tmp_path: Path, state: ReplicaState) -> None:
    folder = folder_at(tmp_path / "deep" / "folder")
    save_state(folder, PEER, ONE, state)
    found = load_newest(folder, PEER)
    assert found is not None
    assert same(found.state, state)
    assert not same(found.state, state_of(5.0))
    assert found.header.owner.module == ONE
    assert found.problems == ()
    assert read_manifest(folder.path).run == folder.run


def test_the_tensors_are_a_safetensors_file_that_its_library_reads(tmp_path: Path) -> None:
    save_state(folder_at(tmp_path), PEER, ONE, NEW)
    read = load_file(tmp_path / PEER / "state-1.safetensors")
    assert torch.equal(read["local/w"], NEW.local["w"])
    assert NEW.anchor is not None
    assert NEW.anchor.momentum is not None
    assert torch.equal(read["momentum/norm"], NEW.anchor.momentum["norm"])


def test_two_snapshots_are_kept_and_numbers_go_on(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    for value in range(4):
        save_state(folder, PEER, ONE, state_of(value))
    (tmp_path / PEER / ".state-json.part").write_bytes(b"left by a crash")
    (tmp_path / PEER / "notes.txt").write_bytes(b"not ours")
    save_state(folder, PEER, ONE, NEW)
    names = [f"state-{n}.{kind}" for n in (4, 5) for kind in ("json", "safetensors")]
    assert sorted(file.name for file in (tmp_path / PEER).iterdir()) == ["notes.txt", *names]


def test_a_damaged_one_is_not_counted_among_the_two(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    save_state(folder, PEER, ONE, OLD)
    save_state(folder, PEER, ONE, state_of(9.0))
    flip(tmp_path / PEER / "state-2.safetensors", -1)
    save_state(folder_at(tmp_path), PEER, ONE, NEW)  # another process: what this one has written, it believes
    assert sorted(file.name for file in (tmp_path / PEER).glob("*.json")) == ["state-1.json", "state-3.json"]


def flip(file: Path, at: int, by: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= by
    file.write_bytes(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=120, deadline=None)
@given(st.sampled_from(["json", "safetensors"]), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_any_changed_byte_is_found_and_the_one_before_is_taken(
    tmp_path: Path, kind: str, where: float, by: int
) -> None:
    shutil.rmtree(tmp_path)
    folder = folder_at(tmp_path)
    save_state(folder, PEER, ONE, OLD)
    save_state(folder, PEER, ONE, NEW)
    file = tmp_path / PEER / f"state-2.{kind}"
    flip(file, int(where * file.stat().st_size), by)
    found = load_newest(folder, PEER)
    assert found is not None
    assert same(found.state, OLD)
    (problem,) = found.problems
    assert problem.file == file


@pytest.mark.parametrize("kind", ["json", "safetensors"])
@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_found(tmp_path: Path, kind: str, keep: float) -> None:
    folder = folder_at(tmp_path)
    save_state(folder, PEER, ONE, OLD)
    save_state(folder, PEER, ONE, NEW)
    file = tmp_path / PEER / f"state-2.{kind}"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    found = load_newest(folder, PEER)
    assert found is not None
    assert same(found.state, OLD)
    assert [problem.file for problem in found.problems] == [file]


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    save_state(folder, PEER, ONE, OLD)
    save_state(folder, PEER, ONE, NEW)
    flip(tmp_path / PEER / "state-1.safetensors", 100)
    (tmp_path / PEER / "state-2.safetensors").unlink()
    with pytest.raises(CorruptSnapshot, match=r"state-2\.safetensors.*state-1\.safetensors"):
        load_newest(folder, PEER)


def test_without_a_json_there_is_no_snapshot(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    assert load_newest(folder, PEER) is None
    save_state(folder, PEER, ONE, OLD)
    (tmp_path / PEER / "state-1.json").unlink()
    assert load_newest(folder, PEER) is None


@pytest.mark.parametrize("kinds", [("json",), ("safetensors",), ("json", "safetensors")])
@pytest.mark.parametrize("whose", ["run", "peer", "module", "number"])
def test_files_of_another_run_peer_module_or_number_are_refused(
    tmp_path: Path, whose: str, kinds: tuple[str, ...]
) -> None:
    folder, foreign = folder_at(tmp_path / "ours"), tmp_path / "foreign"
    other = folder_at(foreign, manifest=small_manifest(seed=99) if whose == "run" else None)
    module = ModuleId(2) if whose == "module" else ONE
    source_peer = OTHER if whose == "peer" else PEER
    for _ in range(1 if whose == "number" else 2):
        save_state(other, source_peer, module, state_of(66.0))
    save_state(folder, PEER, ONE, OLD)
    save_state(folder, PEER, ONE, NEW)
    number = 1 if whose == "number" else 2
    for kind in kinds:
        shutil.copy(foreign / source_peer / f"state-{number}.{kind}", folder.of(PEER) / f"state-2.{kind}")
    found = load_newest(folder, PEER, ONE)
    assert found is not None
    assert same(found.state, OLD)
    is_a_state_of_its_own = whose == "module" and len(kinds) == 2  # then it is only not the module asked for
    assert len(found.problems) == (0 if is_a_state_of_its_own else 1)


def test_an_older_state_of_another_module_is_no_damage(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    save_state(folder, PEER, ModuleId(2), OLD)
    assert load_newest(folder, PEER, ONE) is None
    save_state(folder, PEER, ONE, NEW)
    found = load_newest(folder, PEER, ModuleId(2))
    assert found is not None
    assert same(found.state, OLD)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"owner": None},
        {"owner": {"run": "", "peer": "", "module": {"stage": -1, "expert": 0}}},
        {"data": {"cursor": 3}},
        {"anchor": {"digest": "xy"}},
        {"counters": {}},
        {"file": {"name": "../../key", "size": 1, "blake3": "0" * 64}},
    ],
)
def test_a_json_with_the_right_hash_and_the_wrong_contents_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    table = json.loads(header_bytes(save_state(folder_at(tmp_path), PEER, ONE, NEW)))
    del table["blake3"]
    table |= change

    def written(content: object) -> bytes:
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    with pytest.raises(CorruptSnapshot):
        parse_header(written(table | {"blake3": blake3(written(table)).hexdigest()}))


def test_a_folder_of_another_run_is_neither_read_nor_written_to(tmp_path: Path) -> None:
    save_state(folder_at(tmp_path), PEER, ONE, OLD)
    save_state(folder_at(tmp_path), OTHER, ONE, OLD)  # the same run, signed by somebody else
    another = folder_at(tmp_path, manifest=small_manifest(seed=8))
    for use in (lambda: save_state(another, PEER, ONE, OLD), lambda: load_newest(another, PEER)):
        with pytest.raises(StateError, match="another run"):
            use()
    (tmp_path / "manifest.toml").write_bytes(b"protocol = ")
    with pytest.raises(StateError, match="is damaged"):
        load_newest(folder_at(tmp_path), PEER)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a checkpoint"):
        read_manifest(tmp_path)


THIRD = PeerId("12D3KooWthird")


def save(path: Path, peer: PeerId, value: float, anchor: AnchorVersion | None, tokens: int = 256) -> None:
    save_state(folder_at(path), peer, ONE, state_of(value, anchor=anchor, tokens=tokens))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Modules 0.0 and 2.0 are there; 3 stages in all. A folder that is not a peer's does not disturb."""
    for stage in (0, 2):
        save_state(folder_at(tmp_path), PeerId(f"peer-{stage}"), ModuleId(stage), state_of(stage))
    (tmp_path / "identities").mkdir()
    return tmp_path


def test_one_replica_is_taken_as_it_is(path: Path) -> None:
    save(path, PEER, 0.1, None)
    found = gather_modules(path)
    assert list(found.modules) == [ModuleId(0), ModuleId(1), ModuleId(2)]
    assert torch.equal(found.modules[ONE]["w"], state_of(0.1).local["w"])
    assert found.problems == ()


def test_replicas_of_the_newest_anchor_are_averaged_by_their_tokens(path: Path) -> None:
    save(path, PEER, 1.0, version(5), tokens=100)
    save(path, OTHER, 2.0, version(5), tokens=300)
    save(path, THIRD, 50.0, version(4), tokens=900)
    torch.testing.assert_close(gather_modules(path).modules[ONE]["w"], state_of(1.75).local["w"])


def test_replicas_right_after_a_round_weigh_the_same(path: Path) -> None:
    save(path, PEER, 1.0, version(5), tokens=0)
    save(path, OTHER, 2.0, version(5), tokens=0)
    torch.testing.assert_close(gather_modules(path).modules[ONE]["w"], state_of(1.5).local["w"])


def test_an_anchor_is_newer_than_none_and_two_of_one_round_are_never_mixed(path: Path) -> None:
    save(path, PEER, 1.0, None)
    save(path, OTHER, 2.0, version(1, digest=1))
    save(path, THIRD, 3.0, version(1, digest=2))
    assert torch.equal(gather_modules(path).modules[ONE]["w"], state_of(3.0).local["w"])


def test_a_damaged_snapshot_is_passed_over_and_named(path: Path) -> None:
    save(path, PEER, 1.0, None)
    save(path, PEER, 2.0, None)
    file = path / PEER / "state-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    found = gather_modules(path)
    assert torch.equal(found.modules[ONE]["w"], state_of(1.0).local["w"])
    assert [problem.file for problem in found.problems] == [file]
    (path / PEER / "state-1.safetensors").unlink()
    with pytest.raises(CorruptSnapshot, match=r"module 1\.0 is whole.*state-2"):
        gather_modules(path)


def test_a_module_that_nobody_saved_is_named(path: Path) -> None:
    with pytest.raises(StateError, match=r"no snapshot of module 1\.0"):
        gather_modules(path)


def test_the_older_module_of_a_peer_that_has_moved_counts(path: Path) -> None:
    save(path, PeerId("peer-2"), 9.0, None)
    found = gather_modules(path).modules
    assert torch.equal(found[ModuleId(2)]["w"], state_of(2.0).local["w"])
    assert torch.equal(found[ONE]["w"], state_of(9.0).local["w"])


ROOT = Path(__file__).parent.parent.parent.parent


def steps_of_a_save(path: Path) -> list[str]:
    """Of the third save in a folder, which has something to remove as well."""
    countdown = Countdown(-1, die)
    for value in (1.0, 2.0):
        save_state(folder_at(path), PEER, ONE, state_of(value))
    save_state(folder_at(path, SteppedStorage(countdown)), PEER, ONE, state_of(3.0))
    return countdown.steps


def child(arguments: list[str]) -> None:
    path, at = arguments
    save_state(folder_at(Path(path), SteppedStorage(Countdown(int(at), die))), PEER, ONE, state_of(3.0))


def test_a_process_killed_at_any_step_of_a_save(tmp_path: Path) -> None:
    steps = steps_of_a_save(tmp_path / "counted")
    assert steps.count("rename") == 2
    assert steps.count("remove") == 2
    shutil.copytree(tmp_path / "counted", tmp_path / "before")
    # One process forks for every step: importing torch for each would take minutes.
    code = (
        "import sys; from tests.node.checkpoint.test_snapshots import die_at_every_step; "
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
