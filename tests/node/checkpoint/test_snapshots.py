"""Snapshots: what is read is what was written, or it is refused with the file's name and the one before is taken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from node.checkpoint.folder import header_bytes, load_newest, parse_header, read_manifest, save_state
from node.checkpoint.state import ReplicaState
from swarm.vocabulary.errors import ConfigError, CorruptSnapshot, StateError
from swarm.vocabulary.types import ModuleId
from tests.node.checkpoint.saved_states import CURSOR, ONE, OTHER, PEER, folder_at, same, state_of, version
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
