"""The doctor's checks with machines made up."""

import json
import socket
import threading
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from node.__main__ import app
from node.doctor import examination
from node.doctor.doctor import finding_text, report
from node.doctor.examination import Finding, Level
from node.model.machine_limits import GIB, available_memory
from node.model.memory_need import CPU_BYTES, needs_of, round_bytes
from node.model.moments import DEFAULT_SLOTS, MomentType
from node.network.reach_status import ReachStep, Standing
from swarm.vocabulary.errors import ConfigError, Rejected
from swarm.vocabulary.types import ModuleId, Reasoned
from tests.kit.waiting import ManualClock
from tests.node.small_manifest import small_manifest

HERE = "127.0.0.1"


@pytest.mark.parametrize(
    ("available", "limit", "level"),
    [
        (16 * GIB, "max", Level.OK),
        (3 * GIB, "max", Level.WARN),
        (GIB // 2, "max", Level.FAIL),
        (16 * GIB, str(2 * GIB), Level.WARN),
        (16 * GIB, str(GIB), Level.FAIL),
    ],
)
def test_memory_is_what_machine_and_container_leave(tmp_path: Path, available: int, limit: str, level: Level) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(str(GIB // 4))
    (finding,) = examination.look_at_memory(lambda: available_memory(tmp_path / "meminfo", tmp_path))
    assert finding.level is level
    assert "beside its stage: torch" in finding.found


def test_memory_without_linuxs_files_is_what_posix_says(tmp_path: Path) -> None:
    available = available_memory(tmp_path / "nothing", tmp_path, tmp_path / "nothing").value
    assert available is None or available > 0


def test_a_folder_that_is_still_to_be_made_is_looked_at_where_it_will_be(tmp_path: Path) -> None:
    findings = examination.look_at_disk([("checkpoints", tmp_path / "not" / "yet"), ("logs", tmp_path)])
    assert [finding.level for finding in findings] != [Level.FAIL, Level.FAIL]
    assert "checkpoints" in findings[0].found
    file = tmp_path / "file"
    file.write_text("")
    assert examination.look_at_disk([("logs", file / "inside")])[0].level is Level.FAIL


@pytest.mark.parametrize("free", [GIB // 2, 2 * GIB, 50 * GIB])
def test_little_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    expected = Level.FAIL if free < GIB else Level.WARN if free < 5 * GIB else Level.OK
    assert examination.look_at_disk([("logs", tmp_path)])[0].level is expected


MANIFEST = small_manifest(stages__blocks=(0, 4, 40))
NEEDS = needs_of(MANIFEST, DEFAULT_SLOTS)


def limit(size_bytes: int) -> Reasoned[int]:
    return Reasoned(size_bytes, "under --memory-limit")


def test_the_largest_stage_is_told_in_parameters() -> None:
    size_bytes = 3 * 10**6 * (CPU_BYTES + 8 + int(round_bytes(1)))
    (finding,) = examination.look_at_stage_memory("cpu", limit(size_bytes))
    assert finding.level is Level.OK
    in_fragments = f"{int(size_bytes / (CPU_BYTES + 8 + round_bytes(8))) // 10**5 / 10} in a run with 8 fragments"
    assert finding.found.startswith(f"a stage of up to 3.0 million parameters fits, {in_fragments}: ")
    assert finding.found.endswith("free under --memory-limit")


def test_moments_in_8_bits_leave_room_for_more() -> None:
    (finding,) = examination.look_at_stage_memory("cpu", limit(3 * 10**6 * (CPU_BYTES + 8 + 20)), MomentType.EIGHT_BIT)
    assert finding.found.startswith("a stage of up to 3.4 million parameters fits, ")


@pytest.mark.parametrize(
    ("size_bytes", "level", "said"),
    [
        (NEEDS[ModuleId(2)].all, Level.OK, "all stages fit; the largest, 2, takes"),
        (NEEDS[ModuleId(2)].all - 1, Level.OK, "there is room for stages 0, 1; of the others stage 2 takes"),
        (NEEDS[ModuleId(0)].all, Level.OK, "there is room for stage 0; of the others stage 1 takes"),
        (NEEDS[ModuleId(0)].all - 1, Level.FAIL, "no stage fits; the smallest, 0 takes"),
    ],
)
def test_the_stages_of_a_run_are_named(size_bytes: int, level: Level, said: str) -> None:
    (finding,) = examination.what_fits_of("cpu", limit(size_bytes), MomentType.FLOAT32, MANIFEST)
    assert (finding.level, finding.found[: len(said)]) == (level, said)


def test_a_device_that_multiplies_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.doctor.examination.matmul_flops", lambda device, size: None)
    assert examination.look_at_device("cpu")[0].level is Level.FAIL


def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU here")
    monkeypatch.setattr("node.doctor.examination.NVIDIA", tmp_path)
    finding = examination.look_at_device("auto")[0]
    assert (finding.level, "CUDA" in finding.fix) == (Level.WARN, True)


@pytest.mark.parametrize(("free", "level"), [(20 * GIB, Level.OK), (GIB, Level.WARN)])
def test_a_gpu_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch, free: int, level: Level) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free, 24 * GIB))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA RTX 4090")
    monkeypatch.setattr("node.model.device.choose_devices", lambda wish: Reasoned((torch.device("cuda"),), "auto"))
    monkeypatch.setattr("node.doctor.examination.matmul_flops", lambda device, size: 5e13)
    finding = examination.look_at_device("auto")[0]
    assert finding.level is level
    assert finding.found.startswith(f"NVIDIA RTX 4090, {free / GIB:.1f} of 24.0 GiB free; a CUDA matrix product")
    assert "50,000 GFLOP/s" in finding.found


def test_a_port_that_is_taken_fails_and_a_free_one_does_not() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        finding = examination.look_at_port(HERE, port)[0]
        assert (finding.level, str(port) in finding.found) == (Level.FAIL, True)
    assert [examination.look_at_port(HERE, free)[0].level for free in (port, 0)] == [Level.OK, Level.OK]
    assert examination.look_at_port("203.0.113.1", 0)[0].level is Level.FAIL, "no address of this machine"


@pytest.mark.parametrize(
    ("offsets", "level", "said"),
    [
        ([], Level.SKIP, ""),
        ([0.1, -0.3], Level.OK, ""),
        ([10.0, 11.0, 0.0], Level.WARN, "10.0 s behind"),
        ([-90.0], Level.FAIL, "90.0 s ahead"),
        ([0.0, 0.1, 4000.0], Level.OK, ""),
    ],
)
def test_the_clock_is_compared_with_the_median(offsets: Sequence[float], level: Level, said: str) -> None:
    assert examination.clock_finding(offsets).level is level
    assert said in examination.clock_finding(offsets).found


async def test_an_offset_is_taken_at_half_the_round_trip() -> None:
    clock = ManualClock()

    async def answer() -> bytes:
        said = json.dumps({"unix_ms": int((clock.wall() + 7.0 + 1.0) * 1000)}).encode()
        clock.now += 2.0
        return said

    assert await examination.clock_offset(answer, clock) == pytest.approx(7.0, abs=0.01)


@pytest.mark.parametrize("answer", [b"{}", b"[]", b"no json", b'{"unix_ms": "now"}', b'{"unix_ms": true}', None])
async def test_a_peer_that_does_not_tell_its_time_is_left_out(answer: bytes | None) -> None:
    async def ask() -> bytes:
        if answer is None:
            raise Rejected("no")
        return answer

    assert await examination.clock_offset(ask, ManualClock()) is None


def test_a_node_that_nobody_can_dial_fails_and_says_what_to_do() -> None:
    levels = {
        step.name: examination.reach_finding(Standing(step, "because", fix="forward it")).level.name
        for step in ReachStep
    }
    assert levels == {"DIRECT": "OK", "MAPPED": "OK", "REVERSE": "WARN", "UNKNOWN": "WARN", "UNREACHABLE": "FAIL"}
    finding = examination.reach_finding(Standing(ReachStep.UNREACHABLE, "because", fix="forward it"))
    assert (finding.found, finding.fix) == ("unreachable: because", "forward it")


async def test_a_check_that_hangs_or_breaks_is_a_finding() -> None:
    let_go = threading.Event()

    def hang() -> Sequence[Finding]:
        let_go.wait(30)
        return []

    hung = await examination.bounded("device", hang, 0.05)
    let_go.set()
    assert [finding.level for finding in hung] == [Level.FAIL]

    def no_permission() -> Sequence[Finding]:
        raise PermissionError(13, "Permission denied")

    def refused() -> Sequence[Finding]:
        raise ConfigError("device 'cuda' is not there", hint="Use --device auto.")

    assert (await examination.bounded("disk", no_permission, 5))[0].found == "Permission denied"
    assert (await examination.bounded("device", refused, 5))[0].fix == "Use --device auto."

    def bug() -> Sequence[Finding]:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        await examination.bounded("disk", bug, 5)


def test_a_peers_words_cannot_draw_on_the_terminal() -> None:
    line = finding_text(Finding("reach", Level.FAIL, "x\x1b[2J\n" * 3, "do\rthis"))
    assert "\x1b" not in line
    assert line.count("\n") == 1
    assert line.startswith("fail  reach")


@pytest.mark.e2e
def test_the_command_ends_with_1_only_when_a_check_fails(tmp_path: Path) -> None:
    arguments = ["doctor", "--json", "--device", "cpu", "--listen", HERE, "--identity", str(tmp_path / "key")]
    well = CliRunner().invoke(app, arguments)
    said = json.loads(well.stdout)
    levels = {line["check"]: line["level"] for line in said["checks"]}
    assert (levels["device"], levels["port"], levels["reach"], levels["clock"]) == ("ok", "ok", "skip", "skip")
    assert any("GFLOP/s" in line["found"] for line in said["checks"])
    assert well.exit_code == (0 if said["ok"] else 1)
    with socket.create_server((HERE, 0)) as taken:
        ill = CliRunner().invoke(app, [*arguments, "--port", str(taken.getsockname()[1])])
    assert ill.exit_code == 1
    assert not json.loads(ill.stdout)["ok"]
    plain = CliRunner().invoke(app, [*arguments[:1], *arguments[2:]])
    assert "skip  clock" in plain.stdout
    assert f"ok    versions  Skipstone {metadata.version('skipstone')}" in plain.stdout
    assert f", torch {torch.__version__}, " in plain.stdout


def test_the_report_is_well_with_warnings() -> None:
    said = report([Finding("a", Level.WARN, "so so", "better"), Finding("b", Level.SKIP, "not looked at")])
    assert said["ok"]
    assert said["checks"][0] == {"check": "a", "level": "warn", "found": "so so", "fix": "better"}


def test_a_run_with_experts_and_fewer_peers_than_modules_is_a_warning() -> None:
    (found,) = examination.experts_findings(3, 5, several=True)
    assert found.level is Level.WARN
    assert "3 peers for 5 modules" in found.found
    assert "Let 2 more peers join" in found.fix
    assert examination.experts_findings(5, 5, several=True) == examination.experts_findings(2, 3, several=False) == []
