"""A checkpoint's modules out of the folders of many peers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.checkpoint.folder import gather_modules, save_state
from swarm.vocabulary.errors import CorruptSnapshot, StateError
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId
from tests.node.checkpoint.saved_states import ONE, OTHER, PEER, folder_at, state_of, version

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
