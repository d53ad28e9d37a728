"""Memory is used again when nobody reads it any more, and never before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from node.averaging.anchor import shared_vector
from node.averaging.anchor.shared_vector import KEPT, SpareArrays


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again() -> None:
    arrays = SpareArrays(1000)
    first = arrays.empty(1000)
    place = address(first)
    first[:] = 7
    del first
    again = arrays.empty(900)
    assert address(again) == place
    assert len(again) == 900


@pytest.mark.parametrize("read", [lambda a: a[10:20], lambda a: a[5:][3:].reshape(-1, 4), torch.from_numpy, memoryview])
def test_what_is_still_read_is_not_written(read: object) -> None:
    assert callable(read)
    arrays = SpareArrays(1000)
    first = arrays.empty(1000)
    first[:] = 7
    reader = read(first[8:]) if read is not memoryview else memoryview(first)
    del first
    others = [arrays.empty(1000) for _ in range(4)]
    for other in others:
        other[:] = 1
    assert np.all(np.asarray(reader) == 7)


def test_no_more_is_kept_than_a_round_needs() -> None:
    arrays = SpareArrays(1000)
    places = {address(array) for array in [arrays.empty(1000) for _ in range(5)]}
    assert len(places) == 5
    assert len(arrays._spare) == KEPT


def test_what_is_large_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_vector, "LARGEST_KEPT_BYTES", 3999)
    arrays = SpareArrays(1000)
    arrays.empty(1000)
    assert not arrays._spare
