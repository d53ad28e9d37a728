"""Memory that devices copy from and to, where there is no GPU; `tests/node/device/test_cuda.py` has the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protocol.codecs import memory
from protocol.codecs.memory import BufferPool, buffer_for, to_device, to_host
from swarm.vocabulary.errors import ResourceExhausted

CPU = torch.device("cpu")


def test_on_the_cpu_nothing_is_copied() -> None:
    octets = torch.arange(9, dtype=torch.uint8)
    assert to_host(octets).data_ptr() == to_device(octets, CPU).data_ptr() == octets.data_ptr()


def test_without_a_gpu_memory_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(size_bytes: int) -> None:
        raise AssertionError("nothing is to be pinned")

    monkeypatch.setattr(memory, "_pinned", pinned)
    assert isinstance(buffer_for(9, CPU).obj, bytearray)


def test_where_the_system_has_no_pinned_memory_left_it_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*_: object, **given: object) -> torch.Tensor:
        assert given["pin_memory"]
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(memory.torch, "empty", empty)
    assert isinstance(buffer_for(9, torch.device("cuda")).obj, bytearray)


def test_a_pool_reuses_the_memory_that_it_was_given() -> None:
    made: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        made.append(size_bytes)
        return np.zeros(size_bytes, np.uint8).data

    pool = BufferPool(100, 2, allocate)
    first, second = pool.take(), pool.take()
    with pytest.raises(ResourceExhausted):
        pool.take()
    first[:3] = b"abc"
    pool.give_back(first[:50])
    again = pool.take()
    assert (len(again), bytes(again[:3]), made) == (100, b"abc", [100, 100])
    assert second.nbytes == 100
