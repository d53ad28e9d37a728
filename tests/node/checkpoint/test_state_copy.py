"""A replica is written as it was at one moment, however it goes on, and little of it is in memory twice."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from node.checkpoint import state as state_copy
from node.checkpoint.folder import (
    CheckpointFolder,
    gather_modules,
    header_bytes,
    keep_left,
    load_newest,
    parse_header,
    read_manifest,
    save_state,
)
from node.checkpoint.saver import Saver, SaveRequests, capture_module, restore_module
from node.checkpoint.state import Agreed, ReplicaState, ResumedState, StateCopy
from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.initialization import digest_of_tensors, parameters_of
from node.model.moments import MomentType
from node.model.optimizer import Accumulator, InnerOptimizer
from node.model.optimizers.adamw import AdamW
from node.model.passes import build_block_stack
from node.observability.events import Event, LastPeer
from node.pipeline.worker import host_hop
from node.runtime.resume import (
    NUMBERS,
    RESERVED_NUMBERS,
    capture_hop,
    counts_of,
    find_own,
    first_number,
    restore_hop,
    saved_modules,
)
from node.runtime.serving import save_at_the_end
from protocol.interfaces.clock import SystemClock
from swarm.pipeline.in_flight import Counts
from swarm.vocabulary.errors import CorruptSnapshot, ResourceExhausted, StateError
from swarm.vocabulary.types import AnchorVersion, MicrobatchId, ModuleId, PeerId
from tests.kit.events import KeptEvents
from tests.kit.waiting import LONG_S, until
from tests.node.checkpoint.saved_states import (
    CPU,
    CURSOR,
    ONE,
    OTHER,
    PEER,
    Countdown,
    SteppedStorage,
    die,
    flip,
    folder_at,
    same,
    state_of,
    version,
)
from tests.node.small_manifest import small_manifest
from tests.test_project import ROOT


class Replica:
    """A small module with its optimizer, fed with gradients that follow from a number."""

    def __init__(self, seed: int = 3, moments: MomentType = MomentType.FLOAT32, *, split: bool = False) -> None:
        wide = {} if moments is MomentType.FLOAT32 else {"model__hidden": 64, "model__feed_forward": 96}
        part = build_block_stack(small_manifest(seed=seed, **wide), ONE)
        if split:
            part.split_weights()
        self.part: nn.Module = part
        self.total = Accumulator(self.part)
        self.optimizer = InnerOptimizer(small_manifest(), ModuleId(0), [self.total], moments=moments)

    def steps(self, first: int, count: int, peer: str = "a") -> None:
        for number in range(first, first + count):
            numbers = torch.Generator().manual_seed(number)
            gradients: list[Tensor] = [torch.randn(p.shape, generator=numbers) for p in self.total.parameters]
            self.total.add(MicrobatchId(PeerId(peer), number), 32, gradients)
            self.optimizer.step()


def test_it_goes_on_to_the_bit_through_a_file(tmp_path: Path) -> None:
    one, other = Replica(), Replica(seed=8)
    one.steps(0, 5)
    save_state(folder_at(tmp_path), PEER, ONE, capture_module((one.part,), one.optimizer, visits=5, tokens=5 * 32))
    one.steps(5, 5)  # what was captured is a copy, or this would change it
    other.steps(100, 2)
    found = load_newest(folder_at(tmp_path), PEER)
    restore_module((other.part,), other.optimizer, found.state)
    assert other.optimizer.steps == 5
    other.steps(5, 5)
    assert digest_of_tensors(parameters_of(other.part)) == digest_of_tensors(parameters_of(one.part))
    assert found.state.counters.tokens == found.state.counters.tokens_since_anchor == 5 * 32


@pytest.mark.parametrize("split", [False, True])
def test_moments_in_8_bits_go_on_to_the_bit_and_either_form_is_read_as_the_other(tmp_path: Path, split: bool) -> None:
    """What is written is float32 in any case, slice by slice, and the weights whole."""
    one = Replica(moments=MomentType.EIGHT_BIT, split=split)
    one.steps(0, 5)
    with ComputeThread() as compute:
        post = partial(compute.post, Priority.UPKEEP)
        captured = partial(capture_module, (one.part,), one.optimizer, post, visits=5, tokens=5 * 32)
        states = list[ReplicaState]()
        post(lambda: states.append(captured())).result()
        save_state(folder_at(tmp_path), PEER, ONE, states.pop())
    found = load_newest(folder_at(tmp_path), PEER)
    tensors = (tensor for own in found.state.inner.parameters.values() for tensor in own.tensors.values())
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    other, plain = (Replica(seed=8, moments=MomentType.EIGHT_BIT) for _ in range(2))
    plain.optimizer = InnerOptimizer(small_manifest(), ModuleId(0), [plain.total])
    for each in (other, plain):
        restore_module((each.part,), each.optimizer, found.state)
    one.steps(5, 3)
    other.steps(5, 3)
    assert digest_of_tensors(copies_of(other)) == digest_of_tensors(copies_of(one))
    assert [type(rule) for rule in plain.optimizer.rules] == [AdamW]
    kept = plain.optimizer.export_state(parameters_of(plain.part))
    for name, own in found.state.inner.parameters.items():
        assert all(torch.equal(kept.parameters[name].tensors[slot], each) for slot, each in own.tensors.items())
    plain.steps(5, 3)
    there, here = (torch.cat([t.flatten() for t in copies_of(each).values()]) for each in (plain, one))
    assert 0 < (there - here).norm() / here.norm() < 1e-3
    back = Replica(moments=MomentType.EIGHT_BIT)
    restore_module((back.part,), back.optimizer, capture_module((plain.part,), plain.optimizer, visits=8, tokens=256))
    back.steps(8, 1)
    assert back.optimizer.steps == 9
    assert all(bool(t.isfinite().all()) for t in copies_of(back).values())


def copies_of(replica: Replica) -> dict[str, Tensor]:
    return dict(capture_module((replica.part,), replica.optimizer, visits=0, tokens=0).local)


def test_an_optimizer_that_has_not_stepped_has_an_empty_state() -> None:
    one, other = Replica(), Replica()
    other.steps(0, 3)
    restore_module((other.part,), other.optimizer, capture_module((one.part,), one.optimizer, visits=0, tokens=0))
    assert digest_of_tensors(parameters_of(other.part)) == digest_of_tensors(parameters_of(one.part))
    one.steps(0, 2)
    other.total.start_over()
    other.steps(0, 2, "b")
    assert digest_of_tensors(parameters_of(other.part)) == digest_of_tensors(parameters_of(one.part))


def test_a_state_of_another_model_changes_nothing() -> None:
    one = Replica()
    one.steps(0, 1)
    before = digest_of_tensors(parameters_of(one.part))
    with pytest.raises(StateError, match="other parameters"):
        restore_module((one.part,), one.optimizer, state_of(1.0))
    with pytest.raises(StateError, match="another model"):
        one.optimizer.import_state(parameters_of(one.part), state_of(1.0).inner)
    assert (digest_of_tensors(parameters_of(one.part)), one.optimizer.steps) == (before, 1)


def at_once(job: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()
    done.set_result(job())
    return done


def test_a_stage_peer_counts_what_is_applied_and_keeps_its_anchor() -> None:
    worker, other = (host_hop(small_manifest(), ModuleId(1), CPU, 0) for _ in range(2))
    worker.accumulated, worker.accumulated_tokens = 7, 200
    anchor = state_of(1.0, anchor=version(3)).anchor
    state = capture_hop(worker, Agreed(anchor, 2, 64), at_once)
    assert (state.counters.visits, state.counters.tokens) == (7, 200)
    assert (state.counters.steps_since_anchor, state.counters.tokens_since_anchor) == (2, 64)
    assert state.anchor is anchor
    restore_hop(other, state)
    assert (other.accumulated, other.accumulated_tokens) == (7, 200)
    assert other.optimizer.tokens == version(3).tokens + 64, "where it stands in the schedule"


def test_numbers_keep_away_from_those_of_the_life_before() -> None:
    data = state_of(1.0, cursor=CURSOR).data
    assert (first_number(None, 1000), first_number(data, 2**40)) == (1000, 2**40)
    for near in (data.next_number - 1, data.next_number, data.next_number + RESERVED_NUMBERS):
        assert first_number(data, near) > data.next_number + RESERVED_NUMBERS
    last = replace(data, next_number=NUMBERS // 2 - 5)
    for near in (NUMBERS // 2 - RESERVED_NUMBERS, NUMBERS // 2 - 1):
        assert abs(first_number(last, near) - last.next_number) > RESERVED_NUMBERS
        assert 0 <= first_number(last, near) < NUMBERS // 2
    assert counts_of(data) == Counts(started=9, completed=8, abandoned=1, duplicated=0)


def test_what_was_damaged_is_told_and_when_all_is_damaged_the_node_begins_anew(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    assert find_own(folder, PEER, None)[1] == ()
    for value in (1.0, 2.0):
        save_state(folder, PEER, ONE, state_of(value))
    (folder.of(PEER) / "state-2.safetensors").write_bytes(b"")
    resumed, notes = find_own(folder, PEER, None)
    assert resumed.module == ONE
    assert [note.level for note in notes] == ["warning", "info"]
    assert "state-2.safetensors" in notes[0].message
    (folder.of(PEER) / "state-1.json").write_bytes(b"")
    resumed, (note,) = find_own(folder, PEER, None)
    assert (resumed.state, note.level) == (None, "warning")
    assert "starts without" in note.message


def test_a_whole_path_is_known_from_its_snapshots(tmp_path: Path) -> None:
    folder, others = folder_at(tmp_path), [PeerId("other"), PeerId("third")]
    save_state(folder, PEER, ModuleId(1, 3), state_of(1.0))
    save_state(folder, others[0], ModuleId(2, 1), state_of(2.0))
    assert saved_modules(folder, [PEER, *others]) == [ModuleId(1, 3), ModuleId(2, 1)]
    assert saved_modules(folder_at(tmp_path / "empty"), [PEER]) == []


@dataclass
class Bench(KeptEvents):
    """A saver at work, the replica it saves, and what it says."""

    path: Path
    steps: int = 1
    captures: int = 0
    events: list[Event] = field(default_factory=list)
    disk: Callable[[str], None] = lambda step: None
    requests: SaveRequests = field(default_factory=SaveRequests)

    def capture(self) -> ReplicaState:
        assert threading.current_thread().name == "compute"
        self.captures += 1
        return state_of(float(self.captures), steps=self.steps)

    def newest(self) -> int:
        found = load_newest(folder_at(self.path), PEER)
        return 0 if found is None else found.header.number

    @asynccontextmanager
    async def saver(self, every_s: float = LONG_S) -> AsyncIterator[Saver]:
        folder = folder_at(self.path, SteppedStorage(lambda step: self.disk(step)))
        write = partial(save_state, folder, PEER, ONE)
        with ComputeThread() as compute, Saver(self.capture, write, compute, self.requests, self, every_s) as saver:
            running = asyncio.create_task(saver.run())
            try:
                yield saver
            finally:
                running.cancel()


async def test_the_interval_saves_only_what_has_changed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.saver(every_s=0.01):
        await until(lambda: bench.captures > 5)
        assert bench.newest() == 1
        bench.steps = 2
        await until(lambda: bench.newest() == 2)


async def test_a_failure_is_a_warning_and_the_next_one_may_succeed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def full(step: str) -> None:
        raise OSError(28, "No space left on device")

    bench.disk = full
    async with bench.saver() as saver:
        bench.requests.request_save("round 1")
        await until(lambda: bench.events)
        (note,) = bench.events
        assert note.level == "warning"
        assert "No space left" in note.message
        bench.requests.request_save("round 2")
        await until(lambda: bench.captures > 1)
        assert len(bench.events) == 1, "the same warning once in five minutes"
        # The last peer of a module says that its state is saved only if it is.
        membership = SimpleNamespace(replicas=lambda *_: [])
        session = SimpleNamespace(own=SimpleNamespace(peer=PEER, clock=SystemClock()), membership=membership)
        where = SimpleNamespace(checkpoint_dir=tmp_path)
        context: Any = SimpleNamespace(session=session, module=ONE, resumed=ResumedState(), options=where)
        context.events = SimpleNamespace(emit=bench.events.append)
        with pytest.raises(ResourceExhausted):
            await save_at_the_end(context, saver)
        bench.disk = lambda step: None
        await save_at_the_end(context, saver)
    assert bench.events[1:] == [LastPeer(PEER, str(ONE), None), LastPeer(PEER, str(ONE), str(tmp_path))]
    assert bench.newest() == 1


async def test_two_writes_never_overlap_and_the_last_one_waits_for_the_one_before(tmp_path: Path) -> None:
    bench, gate, reached = Bench(tmp_path), threading.Event(), threading.Event()
    active, overlaps = 0, 0

    def slow(step: str) -> None:
        nonlocal active, overlaps
        active += 1
        overlaps += active > 1
        if step == "rename":
            reached.set()
            assert gate.wait(LONG_S)
        active -= 1

    bench.disk = slow
    async with bench.saver() as saver:
        bench.requests.request_save("round 1")
        await until(reached.is_set)
        last = asyncio.create_task(saver.save_at_the_end())
        await until(lambda: bench.captures == 2)
        gate.set()
        await last
    assert (overlaps, bench.newest()) == (0, 2)


TENSORS = {"local/a": torch.arange(1000.0), "local/b": torch.arange(6.0).view(2, 3).T, "exp_avg/a": torch.ones(())}


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copy, "SLICE", 64)
    monkeypatch.setattr(state_copy, "LEAST_ROOM", 1024)


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    with ComputeThread() as thread:
        yield thread


def numbers(pieces: list[memoryview]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.float32)


@pytest.mark.usefixtures("small_slices")
def test_what_waits_to_be_written_is_never_more_than_there_is_room_for() -> None:
    copy = StateCopy(TENSORS, lambda job: Future(), room=600)  # the compute thread has no time: it finishes
    finishing = threading.Thread(target=copy.finish)
    finishing.start()
    finishing.join(0.05)  # it fills the room, and waits for the writer
    held, pieces = [copy.waiting_bytes], []
    for piece in copy.pieces():
        held.append(copy.waiting_bytes)
        pieces.append(piece)
    finishing.join(LONG_S)
    assert not finishing.is_alive()
    assert max(held) <= 600
    assert torch.equal(numbers(pieces), torch.cat([tensor.reshape(-1) for tensor in TENSORS.values()]))


@pytest.mark.usefixtures("small_slices")
def test_who_waits_for_the_disk_goes_on_when_the_writer_gives_up() -> None:
    copy = StateCopy(TENSORS, at_once)
    finishing = threading.Thread(target=copy.finish)
    finishing.start()
    copy.give_up()
    finishing.join(LONG_S)
    assert not finishing.is_alive()
    copy.finish()


@pytest.mark.usefixtures("small_slices")
def test_a_compute_thread_that_has_stopped_ends_the_writing(compute: ComputeThread) -> None:
    pieces = StateCopy(TENSORS, partial(compute.post, Priority.UPKEEP)).pieces()
    next(pieces)
    compute.__exit__(None, None, None)
    with pytest.raises(StateError, match="stopped"):
        list(pieces)


@pytest.mark.usefixtures("small_slices")
def test_what_is_written_is_the_replica_at_one_moment(compute: ComputeThread, tmp_path: Path) -> None:
    replica = Replica()
    replica.steps(0, 3)
    post = partial(compute.post, Priority.UPKEEP)
    capture = partial(capture_module, (replica.part,), replica.optimizer, visits=3, tokens=96)
    as_it_was, captured, stepping = capture(), list[ReplicaState](), list[Future[None]]()
    post(lambda: captured.append(capture(post))).result(LONG_S)

    def disk(step: str) -> None:
        if step == "written" and not stepping:
            stepping.append(post(lambda: replica.steps(3, 2)))

    save_state(folder_at(tmp_path, SteppedStorage(disk)), PEER, ONE, captured.pop())
    stepping.pop().result(LONG_S)
    assert same(load_newest(folder_at(tmp_path), PEER).state, as_it_was)
    assert replica.optimizer.steps == 5


@pytest.mark.usefixtures("small_slices")
def test_the_next_capture_does_not_mix_with_the_one_before(compute: ComputeThread) -> None:
    replica = Replica()
    replica.steps(0, 3)
    post = partial(compute.post, Priority.UPKEEP)
    capture = partial(capture_module, (replica.part,), replica.optimizer, post, visits=3, tokens=96)
    expected_first = capture_module((replica.part,), replica.optimizer, visits=3, tokens=96)
    captured: list[ReplicaState] = []
    post(lambda: captured.append(capture())).result(LONG_S)
    first = captured[0].copying
    capturing = post(lambda: captured.append(capture()))
    writing = list(first.pieces())
    capturing.result(LONG_S)
    captured[1].copying.give_up()
    post(lambda: replica.steps(3, 1)).result(LONG_S)
    whole = torch.cat([tensor.reshape(-1) for tensor in expected_first.local.values()])
    assert torch.equal(numbers(writing)[: len(whole)], whole)
    assert replica.optimizer.steps == 4


def saved(path: Path, *states: ReplicaState) -> CheckpointFolder:
    folder = folder_at(path)
    for state in states:
        save_state(folder, PEER, ONE, state)
    return folder


NEW, OLD = state_of(2.0, anchor=version(3), cursor=CURSOR), state_of(1.0)


@pytest.mark.parametrize("state", [OLD, NEW, state_of(3.0, anchor=version(1)), state_of(4.0, cursor=CURSOR)])
def test_a_state_comes_back_as_it_was(tmp_path: Path, state: ReplicaState) -> None:
    folder = saved(tmp_path / "deep" / "folder", state)
    found = load_newest(folder, PEER)
    assert same(found.state, state)
    assert not same(found.state, state_of(5.0))
    assert (found.header.owner.module, found.problems) == (ONE, ())
    assert read_manifest(folder.path).run == folder.run
    read = load_file(folder.of(PEER) / "state-1.safetensors")  # with the format's own library
    assert torch.equal(read["local/w"], state.local["w"])
    assert state.anchor is None or torch.equal(read["momentum/norm"], state.anchor.momentum["norm"])


def test_two_snapshots_are_kept_and_numbers_go_on(tmp_path: Path) -> None:
    folder = saved(tmp_path, *map(state_of, range(4)))
    (tmp_path / PEER / ".state-json.part").write_bytes(b"left by a crash")
    (tmp_path / PEER / "notes.txt").write_bytes(b"not ours")
    save_state(folder, PEER, ONE, NEW)
    names = [f"state-{n}.{kind}" for n in (4, 5) for kind in ("json", "safetensors")]
    assert sorted(file.name for file in (tmp_path / PEER).iterdir()) == ["notes.txt", *names]


def test_the_snapshot_before_an_anchor_was_left_stays_for_an_hour(tmp_path: Path) -> None:
    place, left = tmp_path / PEER, tmp_path / PEER / "left"
    place.mkdir()
    assert not keep_left(place), "nothing is saved yet"
    folder = saved(tmp_path, OLD)
    assert keep_left(place)
    for _ in range(3):
        save_state(folder, PEER, ONE, NEW)
    assert keep_left(place), "a second time within the hour"
    assert sorted(os.listdir(left)) == ["state-1.json", "state-1.safetensors"]
    assert torch.equal(load_file(left / "state-1.safetensors")["local/w"], OLD.local["w"])
    os.utime(left, (0, 0))
    assert keep_left(place)
    assert sorted(os.listdir(left)) == ["state-4.json", "state-4.safetensors"]


def test_a_damaged_one_is_not_counted_among_the_two(tmp_path: Path) -> None:
    saved(tmp_path, OLD, state_of(9.0))
    flip(tmp_path / PEER / "state-2.safetensors", -1)
    save_state(folder_at(tmp_path), PEER, ONE, NEW)  # another process: what this one has written, it believes
    assert sorted(file.name for file in (tmp_path / PEER).glob("*.json")) == ["state-1.json", "state-3.json"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.sampled_from(["json", "safetensors"]), st.floats(0, 1, exclude_max=True), st.integers(0, 255))
def test_a_changed_byte_is_found_and_the_one_before_is_taken(tmp_path: Path, kind: str, where: float, by: int) -> None:
    """Where a byte is changed by 0, the file ends."""
    shutil.rmtree(tmp_path)
    folder = saved(tmp_path, OLD, NEW)
    file = tmp_path / PEER / f"state-2.{kind}"
    at = int(where * file.stat().st_size)
    if by:
        flip(file, at, by)
    else:
        file.write_bytes(file.read_bytes()[:at])
    found = load_newest(folder, PEER)
    assert same(found.state, OLD)
    (problem,) = found.problems
    assert problem.startswith(f"{file}: ")


def test_when_all_are_damaged_each_is_named(tmp_path: Path) -> None:
    folder = saved(tmp_path, OLD, NEW)
    flip(tmp_path / PEER / "state-1.safetensors", 100)
    (tmp_path / PEER / "state-2.safetensors").unlink()
    with pytest.raises(CorruptSnapshot, match=r"state-2\.safetensors.*state-1\.safetensors"):
        load_newest(folder, PEER)
    for file in (tmp_path / PEER).glob("*.json"):
        file.unlink()
    assert load_newest(folder, PEER) is None, "without a JSON there is no snapshot"


@pytest.mark.parametrize("kinds", [("json",), ("safetensors",), ("json", "safetensors")])
@pytest.mark.parametrize("whose", ["run", "peer", "module", "number"])
def test_files_of_another_run_peer_or_module_are_refused(tmp_path: Path, whose: str, kinds: tuple[str, ...]) -> None:
    folder, foreign = folder_at(tmp_path / "ours"), tmp_path / "foreign"
    other = folder_at(foreign, manifest=small_manifest(seed=99) if whose == "run" else None)
    module = ModuleId(2) if whose == "module" else ONE
    source_peer = OTHER if whose == "peer" else PEER
    for _ in range(1 if whose == "number" else 2):
        save_state(other, source_peer, module, state_of(66.0))
    saved(folder.path, OLD, NEW)
    number = 1 if whose == "number" else 2
    for kind in kinds:
        shutil.copy(foreign / source_peer / f"state-{number}.{kind}", folder.of(PEER) / f"state-2.{kind}")
    found = load_newest(folder, PEER, ONE)
    assert same(found.state, OLD)
    assert len(found.problems) == int(whose != "module" or len(kinds) == 1), "both: only not the module asked for"


def test_an_older_state_of_another_module_is_no_damage(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    save_state(folder, PEER, ModuleId(2), OLD)
    assert load_newest(folder, PEER, ONE) is None
    save_state(folder, PEER, ONE, NEW)
    assert same(load_newest(folder, PEER, ModuleId(2)).state, OLD)


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
def test_a_json_with_the_right_hash_and_wrong_contents_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
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


def save(path: Path, peer: PeerId, value: float, anchor: AnchorVersion | None, tokens: int = 256) -> None:
    save_state(folder_at(path), peer, ONE, state_of(value, anchor=anchor, tokens=tokens))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Modules 0.0 and 2.0 are there; 3 stages in all. A folder that is not a peer's does not disturb."""
    for stage in (0, 2):
        save_state(folder_at(tmp_path), PeerId(f"peer-{stage}"), ModuleId(stage), state_of(stage))
    (tmp_path / "identities").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([(0.1, None, 256)], 0.1),
        # Those of the newest anchor by their tokens, and alike right after a round.
        ([(1.0, version(5), 100), (2.0, version(5), 300), (50.0, version(4), 900)], 1.75),
        ([(1.0, version(5), 0), (2.0, version(5), 0)], 1.5),
        # An anchor is newer than none, and two of one round are never mixed.
        ([(1.0, None, 256), (2.0, version(1, digest=1), 256), (3.0, version(1, digest=2), 256)], 3.0),
    ],
)
def test_replicas_of_a_module_become_one(
    path: Path, replicas: list[tuple[float, AnchorVersion | None, int]], expected: float
) -> None:
    for peer, (value, anchor, tokens) in zip((PEER, OTHER, PeerId("12D3KooWthird")), replicas, strict=False):
        save(path, peer, value, anchor, tokens)
    found = gather_modules(path)
    assert list(found.replicas) == [ModuleId(0), ONE, ModuleId(2)]
    torch.testing.assert_close(found.module(ONE)["w"], state_of(expected).local["w"])
    assert found.problems == ()


def test_a_damaged_snapshot_is_passed_over_and_a_missing_one_named(path: Path) -> None:
    with pytest.raises(StateError, match=r"no snapshot of module 1\.0"):
        gather_modules(path)
    save(path, PEER, 1.0, None)
    save(path, PEER, 2.0, None)
    file = path / PEER / "state-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    found = gather_modules(path)
    assert torch.equal(found.module(ONE)["w"], state_of(1.0).local["w"])
    assert [problem.partition(": ")[0] for problem in found.problems] == [str(file)]
    (path / PEER / "state-1.safetensors").unlink()
    with pytest.raises(CorruptSnapshot, match=r"module 1\.0 is intact.*state-2"):
        gather_modules(path)


def test_the_older_module_of_a_peer_that_has_moved_counts(path: Path) -> None:
    save(path, PeerId("peer-2"), 9.0, None)
    found = gather_modules(path)
    assert torch.equal(found.module(ModuleId(2))["w"], state_of(2.0).local["w"])
    assert torch.equal(found.module(ONE)["w"], state_of(9.0).local["w"])


def steps_of_a_save(path: Path) -> list[str]:
    countdown = Countdown(-1, die)
    saved(path, state_of(1.0), state_of(2.0))
    save_state(folder_at(path, SteppedStorage(countdown)), PEER, ONE, state_of(3.0))
    return countdown.steps


def test_a_process_killed_at_any_step_of_a_save(tmp_path: Path) -> None:
    steps = steps_of_a_save(tmp_path / "counted")
    assert (steps.count("rename"), steps.count("remove")) == (2, 2)
    shutil.copytree(tmp_path / "counted", tmp_path / "before")
    # One process forks for every step: importing torch for each would take minutes.
    code = "import sys; from tests.node.checkpoint.test_state_copy import die_at_every_step as die; die(sys.argv[1:])"
    folders = [str(tmp_path / f"at-{step}") for step in range(1, len(steps) + 1)]
    for folder in folders:
        saved(Path(folder), state_of(1.0), state_of(2.0))
    subprocess.run([sys.executable, "-c", code, *folders], cwd=ROOT, timeout=100, check=True)
    outcomes = []
    for folder in map(Path, folders):
        found = load_newest(folder_at(folder), PEER)
        assert found.problems == ()
        assert same(found.state, state_of(2.0)) or same(found.state, state_of(3.0))
        outcomes.append(same(found.state, state_of(3.0)))
        save_state(folder_at(folder), PEER, ONE, state_of(4.0))  # and it goes on from there
        assert same(load_newest(folder_at(folder), PEER).state, state_of(4.0))
        assert len(list((folder / PEER).iterdir())) == 4, "what the crash left behind is gone"
    assert outcomes == sorted(outcomes), "once there, a snapshot stays"
    assert {True, False} == set(outcomes)


def die_at_every_step(folders: list[str]) -> None:
    """In a process of its own: a child of it dies at each step, in a folder of its own."""
    for at, folder in enumerate(folders, start=1):
        pid = os.fork()
        if pid == 0:
            save_state(folder_at(Path(folder), SteppedStorage(Countdown(at, die))), PEER, ONE, state_of(3.0))
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise AssertionError(f"the child that was to die at step {at} did not: {status}")


def test_a_disk_that_fails_at_any_step(tmp_path: Path) -> None:
    for at, step in enumerate(steps_of_a_save(tmp_path / "counted"), start=1):
        number = (errno.ENOSPC, errno.EIO)[at % 2]

        def fail(number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        folder = tmp_path / f"at-{at}"
        saved(folder, state_of(1.0), state_of(2.0))
        storage = SteppedStorage(Countdown(at, fail))
        expected = state_of(3.0)
        if step == "remove":  # the snapshot is whole, only an old file stays a while longer
            save_state(folder_at(folder, storage), PEER, ONE, expected)
        else:
            kind = ResourceExhausted if number == errno.ENOSPC else StateError
            with pytest.raises(kind, match="cannot write the checkpoint"):
                save_state(folder_at(folder, storage), PEER, ONE, expected)
        found = load_newest(folder_at(folder), PEER)
        assert found.problems == ()
        assert same(found.state, expected) or (step != "remove" and same(found.state, state_of(2.0)))
        assert not list((folder / PEER).glob(".*")), f"a failed attempt leaves no rest (step {at}, {step})"
