"""Checkpoints: what is read is what was written, or it is refused with the file's name."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from node.checkpoint import CheckpointFolder, ModuleState, load_module, module_file, read_manifest, save_module
from node.model.build import build_block_stack, build_embedding, build_head
from node.model.initial import digest_of, digest_of_tensors
from swarm.errors import ConfigError, CorruptSnapshot, StateError
from swarm.vocabulary import ModuleId, RunId
from tests.node.small_manifest import small_manifest

RUN = RunId("ab" * 32)
ONE = ModuleId(1)


def folder_at(path: Path, manifest: bytes = b"# manifest") -> CheckpointFolder:
    return CheckpointFolder(path, RUN, manifest)


def saved(path: Path) -> Path:
    return save_module(folder_at(path), ONE, build_block_stack(small_manifest(), ONE), steps=4, tokens=256)


def test_a_module_comes_back_as_it_was(tmp_path: Path) -> None:
    stack = build_block_stack(small_manifest(), ONE)
    save_module(folder_at(tmp_path), ONE, stack, steps=4, tokens=256)
    other = build_block_stack(small_manifest(seed=8), ONE)
    assert load_module(tmp_path, ONE, other) == ModuleState(RUN, ONE, 4, 256)
    assert digest_of(other) == digest_of(stack)
    assert read_manifest(tmp_path) == b"# manifest"


def test_stage_0_is_one_file_for_two_parts_and_files_do_not_disturb_each_other(tmp_path: Path) -> None:
    saved(tmp_path)
    parts = build_embedding(small_manifest()), build_head(small_manifest())
    save_module(folder_at(tmp_path), ModuleId(0), *parts, steps=5, tokens=320)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "manifest.toml",
        "module-0.0.safetensors",
        "module-1.0.safetensors",
    ]
    others = build_embedding(small_manifest(seed=8)), build_head(small_manifest(seed=8))
    load_module(tmp_path, ModuleId(0), *others)
    assert digest_of(*others) == digest_of(*parts)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_changed_byte_is_found_or_changes_nothing(tmp_path: Path, where: float, flip: int) -> None:
    file = saved(tmp_path)
    content = bytearray(file.read_bytes())
    content[int(where * len(content))] ^= flip
    file.write_bytes(content)
    stack = build_block_stack(small_manifest(seed=8), ONE)
    before, written = digest_of(stack), digest_of(build_block_stack(small_manifest(), ONE))
    with contextlib.suppress(CorruptSnapshot):
        load_module(tmp_path, ONE, stack)
        before = written  # not refused: then it was white space in the header
    assert digest_of(stack) == before


def test_a_changed_parameter_is_found_and_nothing_is_loaded(tmp_path: Path) -> None:
    file = saved(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    stack = build_block_stack(small_manifest(seed=8), ONE)
    before = digest_of(stack)
    with pytest.raises(CorruptSnapshot, match=r"module-1\.0\.safetensors"):
        load_module(tmp_path, ONE, stack)
    assert digest_of(stack) == before


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_found(tmp_path: Path, keep: float) -> None:
    file = saved(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(CorruptSnapshot, match=r"module-1\.0\.safetensors"):
        load_module(tmp_path, ONE, build_block_stack(small_manifest(), ONE))


def test_what_the_file_says_of_itself_is_covered_by_its_hash(tmp_path: Path) -> None:
    file = saved(tmp_path)
    with safe_open(file, framework="pt") as opened:
        header = dict(opened.metadata())
    header["state"] = json.dumps(json.loads(header["state"]) | {"steps": 1_000_000})
    save_file(load_file(file), file, metadata=header)
    with pytest.raises(CorruptSnapshot):
        load_module(tmp_path, ONE, build_block_stack(small_manifest(), ONE))


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"module": {"stage": -1}}'])
def test_a_header_with_the_right_hash_and_the_wrong_contents_is_refused(tmp_path: Path, state: str) -> None:
    file = saved(tmp_path)
    tensors = load_file(file)
    checksum = hashlib.sha256(state.encode() + b"\0" + digest_of_tensors(tensors)).hexdigest()
    save_file(tensors, file, metadata={"format": "1", "state": state, "sha256": checksum})
    with pytest.raises(CorruptSnapshot, match="does not understand"):
        load_module(tmp_path, ONE, build_block_stack(small_manifest(), ONE))


def test_a_missing_another_modules_or_another_models_file_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path)
    two = build_block_stack(small_manifest(), ModuleId(2))
    with pytest.raises(StateError, match="no file"):
        load_module(tmp_path, ModuleId(2), two)
    module_file(tmp_path, ModuleId(2)).write_bytes(file.read_bytes())
    with pytest.raises(StateError, match="is not module 2"):
        load_module(tmp_path, ModuleId(2), two)
    with pytest.raises(StateError, match="is not module 1"):
        load_module(tmp_path, ONE, build_block_stack(small_manifest(model__hidden=32), ONE))


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def disk_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(StateError, match="No space left"):
        save_module(folder_at(tmp_path), ONE, build_block_stack(small_manifest(seed=8), ONE), steps=9, tokens=9)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_of_another_run_is_not_written_to(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(StateError, match="another run"):
        save_module(folder_at(tmp_path, b"# another"), ONE, build_block_stack(small_manifest(), ONE), steps=1, tokens=1)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a checkpoint"):
        read_manifest(tmp_path)


def test_bfloat16_parameters_would_be_written_as_float32(tmp_path: Path) -> None:
    stack = build_block_stack(small_manifest(), ONE).to(torch.bfloat16)
    file = save_module(folder_at(tmp_path), ONE, stack, steps=1, tokens=1)
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}
