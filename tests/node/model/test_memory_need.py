"""A manifest is compared with the machine before anything of it is allocated."""

import os
from pathlib import Path

import pytest
import torch

from node.model.device import MOST_DEVICES, choose_devices, device_errors
from node.model.initialization import parameters_of
from node.model.machine_limits import GIB, available_memory, usable_cores
from node.model.memory_need import (
    CPU_BYTES,
    DEVICE_BYTES,
    blocks_that_fit,
    need_of,
    needs_of,
    none_fits,
    parameters_that_fit,
    round_bytes,
    slots_for,
)
from node.model.moments import MomentType
from node.model.optimizer import Accumulator, InnerOptimizer
from node.model.passes import build_block_stack
from node.pipeline.worker import host_hop, host_stage_zero
from node.solo.trainer import WholeModel
from protocol.manifest.manifest import Manifest
from swarm.membership.memory_fit import FreeMemory
from swarm.membership.placement import modules_that_fit
from swarm.vocabulary.errors import ConfigError, ResourceExhausted
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, Reasoned
from tests.node.small_manifest import small_manifest

CPU = torch.device("cpu")
PETABYTES = {
    "model__vocabulary": 1_000_000,
    "model__hidden": 65_536,
    "model__heads": 8,
    "model__kv_heads": 8,
    "model__sequence": 1_048_576,
    "training__rows": 65_536,
    "training__inner_tokens": 65_536 * 1_048_576,
}


def room(memory: int, device: int | None = None) -> FreeMemory:
    return FreeMemory(Reasoned(memory, "in this machine"), None if device is None else Reasoned(device, "on the GPU"))


def elements(manifest: Manifest, stage: int) -> int:
    return sum(p.numel() for part in WholeModel(manifest, CPU).modules()[stage][1] for p in part.parameters())


def test_a_parameter_takes_16_bytes_of_a_card_24_on_the_cpu_and_20_of_memory() -> None:
    manifest = small_manifest()
    with_more, with_less = need_of(manifest, [ModuleId(1)], 5), need_of(manifest, [ModuleId(1)], 0)
    held = 5 * 3 * 2 * 16 * 16 * 4
    assert (DEVICE_BYTES + 8, round_bytes(1)) == (4 + 4 + 8, 8 + 8 + 4), "AdamW has two moments"
    assert CPU_BYTES + 8 == 4 + 8 + 4 + 8
    assert with_less.all - with_less.device - with_less.memory == elements(manifest, 1) * 8
    narrow = need_of(small_manifest(model__dtype="bfloat16"), [ModuleId(1)], 0)
    assert narrow.device < with_less.device, "graphs are half as large, and there is no copy of the weights"
    assert with_less.memory == elements(manifest, 1) * 20
    assert with_more.memory - with_less.memory == held
    assert with_less.device > elements(manifest, 1) * (DEVICE_BYTES + 8)
    many = need_of(small_manifest(training__fragments=8), [ModuleId(1)], 0)
    assert many.memory == int(elements(small_manifest(), 1) * 9.5)


def test_moments_in_8_bits_are_counted_where_they_are_kept() -> None:
    manifest = small_manifest(model__hidden=64, model__feed_forward=192)
    part = build_block_stack(manifest, ModuleId(1))
    saved = sum(8 * p.numel() - 2 * 260 * -(-p.numel() // 256) for p in part.parameters() if p.numel() >= 4096)
    assert saved > 0
    plain, packed = (need_of(manifest, [ModuleId(1)], 0, moments) for moments in MomentType)
    assert (plain.device - packed.device, plain.memory - packed.memory) == (saved, 0)
    assert InnerOptimizer(manifest, ModuleId(1), [Accumulator(part)]).state_bytes == sum(
        8 * p.numel() for p in part.parameters()
    )
    for name in ("soap", "muon"):
        other = small_manifest(model__hidden=64, model__feed_forward=192, training__inner={"name": name})
        needs = [need_of(other, [ModuleId(1)], 0, moments) for moments in MomentType]
        assert needs[0] == needs[1], "those are AdamW's moments"
    there = room(10**9)
    assert (parameters_that_fit(there) or 0) < (parameters_that_fit(there, MomentType.EIGHT_BIT) or 0)
    assert (parameters_that_fit(there) or 0) < (parameters_that_fit(there, fragments=8) or 0)


def test_what_the_inner_optimizer_keeps_is_counted_by_the_shapes() -> None:
    """Against what the optimizers have after steps enough that a refresh is under way."""
    needs = {}
    for name in ("adamw", "soap", "muon"):
        manifest = small_manifest(training__inner={"name": name, "largest_side": 16})
        part = build_block_stack(manifest, ModuleId(1))
        accumulator = Accumulator(part)
        optimizer = InnerOptimizer(manifest, ModuleId(1), [accumulator])
        accumulator.add(MicrobatchId(PeerId("a"), 0), 64, [torch.randn_like(p) for p in accumulator.parameters])
        optimizer.step()
        states = optimizer.export_state(parameters_of(part)).parameters.values()
        kept = sum(4 * tensor.numel() for state in states for tensor in state.tensors.values())
        new_bases = sum(
            4 * tensor.numel() for state in states for slot, tensor in state.tensors.items() if slot.startswith("begun")
        )
        needs[name] = need_of(manifest, [ModuleId(1)], 0).device - kept - new_bases
    assert needs["adamw"] == needs["soap"] == needs["muon"]


def test_what_does_not_fit_is_not_among_the_candidates() -> None:
    manifest = small_manifest(stages__blocks=(1, 40, 1), stages__experts=2, model__attention="documents")
    modules = manifest.modules()
    small, large = need_of(manifest, [ModuleId(2)], 4).all, need_of(manifest, [ModuleId(1)], 4).all
    needs = needs_of(manifest, 4)
    assert modules_that_fit(modules, room(large), needs) == list(modules)
    assert modules_that_fit(modules, room(large - 1), needs) == [ModuleId(0), ModuleId(2, 0), ModuleId(2, 1)]
    assert modules_that_fit(modules, room(small - 1), needs) == []


def test_small_microbatches_have_more_slots() -> None:
    assert [slots_for(each, None) for each in (small_manifest(), small_manifest(**PETABYTES))] == [64, 16]


def test_what_fits_nowhere_is_told_with_what_would_fit() -> None:
    manifest = small_manifest(stages__blocks=(1, 40, 20))
    modules, needs = manifest.modules(), needs_of(manifest, 4)
    lacking = room(needs[ModuleId(2)].all - 1)
    said = str(none_fits(manifest, modules[1:], lacking, 4))
    assert "the smallest, 2.0, takes" in said
    assert "in this machine; there is room for 0.0" in said
    assert "the smallest" not in str(none_fits(manifest, modules[1:2], lacking, 4))
    said = str(none_fits(small_manifest(stages__blocks=(0, 40)), [ModuleId(1)], lacking, 4))
    assert said.endswith("there is room for 0.0")


@pytest.mark.parametrize("blocks", [0, 1, 7, 39])
def test_so_many_blocks_fit(blocks: int) -> None:
    """Where not even stage 0 does: a vocabulary may be larger than the blocks."""
    manifest = small_manifest(stages__blocks=(0, 40), model__vocabulary=900_000)
    alone = small_manifest(stages__blocks=(0, max(1, blocks)), model__vocabulary=900_000)
    there = room(need_of(alone, [ModuleId(1)], 4).all - (blocks == 0))
    assert blocks_that_fit(manifest, there, 4) == blocks
    said = str(none_fits(manifest, manifest.modules(), there, 4))
    numbers = {0: "too little for a stage of one block of this model", 1: "enough for a stage of 1 block of this model"}
    assert said.endswith(numbers.get(blocks, f"enough for a stage of {blocks} blocks of this model"))
    assert "are free in this machine" in said


def test_a_limit_is_what_is_left_and_a_gpus_memory_counts_by_itself() -> None:
    need, limit = need_of(small_manifest(), [ModuleId(1)], 4), Reasoned(1000, "under a limit")
    assert room(10**9).within(limit).lacks(need) == "0.0 MiB are free under a limit"
    assert (room(need.memory, 10**9).within(limit).lacks(need) or "").endswith("under a limit")
    assert room(need.memory, need.device).within(Reasoned(10**12, "under a limit")).lacks(need) is None
    assert "in this machine" in (room(900).within(limit).lacks(need) or "")
    assert FreeMemory(Reasoned(None, "nobody knows"), None).within(limit).memory == limit
    need = need_of(small_manifest(), [ModuleId(1)], 4)
    assert room(need.memory, need.device).lacks(need) is None
    assert "on the GPU" in (room(need.memory, need.device - 1).lacks(need) or "")
    assert "in this machine" in (room(need.memory - 1, need.device).lacks(need) or "")
    assert room(0, 0).and_back(need).lacks(need) is None


@pytest.mark.parametrize(
    "host",
    [lambda m: host_stage_zero(m, CPU), lambda m: host_hop(m, ModuleId(1), CPU, 0), lambda m: WholeModel(m, CPU)],
)
def test_tensors_of_petabytes_are_refused_with_a_sentence(host) -> None:  # type: ignore[no-untyped-def]
    why = r"takes .* GiB .*GiB to keep .*, and .* GiB are free (in|under)"
    with pytest.raises(ResourceExhausted, match=why) as refused:
        host(small_manifest(**PETABYTES))
    assert refused.value.exit_code == 71
    assert "--slots" in refused.value.hint


def test_other_runtime_errors_keep_their_face() -> None:
    with pytest.raises(RuntimeError, match="something else"), device_errors():
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        ({"memory.max": 3 * GIB, "memory.current": GIB}, 2 * GIB),
        ({"memory.max": 3 * GIB, "memory.current": 2 * GIB, "memory.stat": f"anon 5\ninactive_file {GIB}\n"}, 2 * GIB),
        ({"memory.max": "max", "memory.current": GIB}, 8 * GIB),
        ({"user/memory.max": 2 * GIB, "user/me/memory.max": "max", "user/memory.current": GIB}, GIB),
        ({"memory/user/me/memory.limit_in_bytes": GIB, "memory/user/me/memory.usage_in_bytes": GIB // 2}, GIB // 2),
        ({"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": GIB}, 8 * GIB),
    ],
)
def test_limits_of_control_groups_count(tmp_path: Path, files: dict[str, object], expected: int) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (tmp_path / "own").write_text("5:memory:/user/me\n0::/user/me\n")
    for name, value in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(str(value))
    assert available_memory(tmp_path / "meminfo", tmp_path / "groups", tmp_path / "own").value == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "50000 100000"}, 1),
        ({"user/cpu.max": "200000 100000", "user/me/cpu.max": "400000 100000"}, 2),
        ({"cpu/user/me/cpu.cfs_quota_us": "250000\n", "cpu/user/me/cpu.cfs_period_us": "50000\n"}, 5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"cpu.max": "100000 0"}, 16),
    ],
)
def test_a_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)
    (tmp_path / "own").write_text("4:cpu,cpuacct:/user/me\n0::/user/me\n")
    for name, value in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(value)
    assert usable_cores(tmp_path / "groups", tmp_path / "own") == expected


def test_processor_cores_may_be_shared() -> None:
    assert choose_devices("cpu, cpu").value == (torch.device("cpu"), torch.device("cpu"))
    assert choose_devices("cpu").value == (torch.device("cpu"),)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("cpu,", "unknown"),
        ("cpu,quantum", "unknown"),
        (",".join(["cpu"] * (MOST_DEVICES + 1)), "17 devices"),
        ("cpu,cuda:99", "not available"),
    ],
)
def test_what_cannot_be(wish: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_devices(wish)


def test_gpus_are_each_named_once_and_not_mixed_with_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_devices("cuda:0,cuda:1").value == (torch.device("cuda:0"), torch.device("cuda:1"))
    with pytest.raises(ConfigError, match="named twice"):
        choose_devices("cuda,cuda:0")
    with pytest.raises(ConfigError, match="different kinds"):
        choose_devices("cuda:0,cpu")
