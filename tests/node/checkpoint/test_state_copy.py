"""A replica is written as it was at one moment, however it goes on, and little of it is in memory twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.checkpoint import state as state_copy
from node.checkpoint.folder import load_newest, save_state
from node.checkpoint.saver import capture_module
from node.checkpoint.state import ReplicaState, StateCopy
from node.concurrency.compute_thread import ComputeThread, Priority
from swarm.vocabulary.errors import ResourceExhausted, StateError
from tests.node.checkpoint.saved_states import ONE, PEER, SteppedStorage, folder_at, same
from tests.node.checkpoint.test_resume_state import Replica, at_once

LONG_S = 30.0
TENSORS = {"local/a": torch.arange(1000.0), "local/b": torch.arange(6.0).view(2, 3).T, "exp_avg/a": torch.ones(())}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small replica is more than there is room for."""
    monkeypatch.setattr(state_copy, "SLICE", 64)
    monkeypatch.setattr(state_copy, "LEAST_ROOM", 1024)


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    with ComputeThread() as thread:
        yield thread


def numbers(pieces: list[memoryview]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.float32)


def expected() -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in TENSORS.values()])


def test_all_the_tensors_come_one_after_the_other() -> None:
    assert torch.equal(numbers(list(StateCopy(TENSORS, at_once).pieces())), expected())


def test_what_waits_to_be_written_is_never_more_than_there_is_room_for() -> None:
    copy = StateCopy(TENSORS, lambda job: Future(), room=600)  # the compute thread has no time: it finishes
    held = []
    finishing = threading.Thread(target=copy.finish)
    finishing.start()
    pieces = []
    for piece in copy.pieces():
        held.append(copy.waiting_bytes)
        pieces.append(piece)
    finishing.join(LONG_S)
    assert not finishing.is_alive()
    assert max(held) <= 600
    assert torch.equal(numbers(pieces), expected())


def test_who_waits_for_the_disk_goes_on_when_the_writer_gives_up() -> None:
    copy = StateCopy(TENSORS, at_once)
    finishing = threading.Thread(target=copy.finish)
    finishing.start()
    copy.give_up()
    finishing.join(LONG_S)
    assert not finishing.is_alive()
    copy.finish()


def test_a_compute_thread_that_has_stopped_ends_the_writing(compute: ComputeThread) -> None:
    pieces = StateCopy(TENSORS, partial(compute.post, Priority.UPKEEP)).pieces()
    next(pieces)
    compute.__exit__(None, None, None)
    with pytest.raises(StateError, match="stopped"):
        list(pieces)


def written_meanwhile(replica: Replica, compute: ComputeThread, path: Path) -> tuple[ReplicaState, ReplicaState]:
    """The replica when a write of it began, and what was read again."""
    began, stepped = threading.Event(), threading.Event()

    def disk(step: str) -> None:
        if step == "written":
            began.set()

    def on_compute(job):  # type: ignore[no-untyped-def]
        found = []
        compute.post(Priority.UPKEEP, lambda: found.append(job())).result(LONG_S)
        return found[0]

    post = partial(compute.post, Priority.UPKEEP)
    as_it_was = on_compute(lambda: capture_module((replica.part,), replica.optimizer, visits=3, tokens=96))
    state = on_compute(lambda: capture_module((replica.part,), replica.optimizer, post, visits=3, tokens=96))

    def step() -> None:
        stepped.set()
        replica.steps(3, 2)

    going_on = threading.Thread(target=lambda: (began.wait(LONG_S), on_compute(step)))
    going_on.start()
    save_state(folder_at(path, SteppedStorage(disk)), PEER, ONE, state)
    going_on.join(LONG_S)
    assert stepped.is_set()
    found = load_newest(folder_at(path), PEER)
    assert found is not None
    return as_it_was, found.state


def test_what_is_written_is_the_replica_at_one_moment(compute: ComputeThread, tmp_path: Path) -> None:
    replica = Replica()
    replica.steps(0, 3)
    as_it_was, read = written_meanwhile(replica, compute, tmp_path)
    assert same(read, as_it_was)
    assert replica.optimizer.steps == 5


def test_a_failed_write_holds_nobody_up(compute: ComputeThread, tmp_path: Path) -> None:
    replica = Replica()
    replica.steps(0, 3)
    state = capture_module((replica.part,), replica.optimizer, at_once, visits=3, tokens=96)

    def full(step: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceExhausted):
        save_state(folder_at(tmp_path, SteppedStorage(full)), PEER, ONE, state)
    assert state.copying is not None
    state.copying.give_up()
    replica.steps(3, 1)
    assert replica.optimizer.steps == 4


def test_the_next_capture_does_not_mix_with_the_one_before(compute: ComputeThread) -> None:
    replica = Replica()
    replica.steps(0, 3)
    post = partial(compute.post, Priority.UPKEEP)
    capture = partial(capture_module, (replica.part,), replica.optimizer, post, visits=3, tokens=96)
    expected_first = capture_module((replica.part,), replica.optimizer, visits=3, tokens=96)
    captured: list[ReplicaState] = []
    post(lambda: captured.append(capture())).result(LONG_S)
    first = captured[0].copying
    assert first is not None
    capturing = post(lambda: captured.append(capture()))
    writing = list(first.pieces())
    capturing.result(LONG_S)
    second = captured[1].copying
    assert second is not None
    second.give_up()
    post(lambda: replica.steps(3, 1)).result(LONG_S)
    whole = torch.cat([tensor.reshape(-1) for tensor in expected_first.local.values()])
    assert torch.equal(numbers(writing)[: len(whole)], whole)
    assert replica.optimizer.steps == 4
