"""Blockwise encoding as a device does it that would have to be waited for: the CPU's bytes, and checks that are looked
at later. Its steps run here on the CPU; `tests/node/device` has them on a device that counts waits.
"""

import hashlib
import math
from typing import Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from protocol.codecs import blockwise, decode, encode, memory
from protocol.codecs.blockwise import INT4, INT8, Blockwise
from protocol.codecs.memory import DTYPES, BufferPool, buffer_for, to_device, to_host
from protocol.interfaces.tensor_spec import TensorSpec
from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted, StateError
from swarm.vocabulary.types import Codec

CODECS: Final[dict[Codec, Blockwise]] = {Codec.INT8: INT8, Codec.INT4: INT4}
SIZES: Final = st.sampled_from([0.0, -0.0, 1e-45, 2.0**-126, 1e-3, 0.5, 1.0, -1.0, 1.5, 2.5, 40.0, 1e4, 2.0**100])
DIGESTS: Final = {
    Codec.INT8: "acb3898e4fb2de5954306dac61fe92fc692ad921ad25b6c46a22fd585ff7f068",
    Codec.INT4: "0b7afc8416abcecca8c3040fbfd853559ca4033c2d4b08dfa905e36ef570e694",
}
"""Of the encodings of `corpus`, as they were before there was a way without looking."""


def corpus() -> list[Tensor]:
    """Made of whole numbers, so that it is the same everywhere: plain, with channels that stand out (few, too many, the
    same ones), zeros, tiny ones, vectors, a shorter last block.
    """
    made = []
    for seed, shape in enumerate([(1,), (129,), (3, 5), (7, 64), (2, 40, 96), (1, 300, 515), (40_000,)]):
        numbers = np.random.default_rng(seed).integers(-(2**20), 2**20, shape)
        plain = torch.from_numpy(numbers.astype(np.float32) / 2**18)
        few, many = plain.clone(), plain.clone()
        few[..., ::50] *= 60
        many[..., 3:23] = 1000 * torch.arange(1, many[..., 3:23].shape[-1] + 1)
        made += [plain, few, many, plain * 2.0**-130, plain.round(), torch.zeros_like(plain)]
    return made + [each.bfloat16() for each in made]


def encoded_there(values: Tensor, codec: Codec) -> tuple[bytes, int] | None:
    """None where the codec cannot express it."""
    spec = TensorSpec(tuple(values.shape), DTYPES[values.dtype], codec)
    try:
        spec, octets = blockwise.encode_without_waiting(values, spec, CODECS[codec])
    except StateError:
        return None
    return octets.numpy().tobytes(), spec.outliers


def check_same(values: Tensor, codec: Codec) -> None:
    here, there = encode(values, codec), encoded_there(values, codec)
    if here.spec.codec is not codec:
        assert there is None
        return
    assert there is not None
    data, apart = there
    assert apart == here.spec.outliers
    assert len(data) == here.spec.byte_length
    assert data == here.data


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_are_those_of_the_cpu_and_those_that_there_have_always_been(codec: Codec) -> None:
    digest, outliers = hashlib.sha256(), set[int]()
    for values in corpus():
        encoded = encode(values, codec)
        assert encode(values.float(), codec).data == encoded.data, "bfloat16 as the same numbers in float32"
        digest.update(encoded.data)
        outliers.add(encoded.spec.outliers)
        check_same(values, codec)
    assert digest.hexdigest() == DIGESTS[codec]
    assert {0, 2, 4, 6, 11, 20} <= outliers, "there are some of every kind"


@pytest.mark.parametrize("codec", CODECS)
@given(
    values=arrays(np.float32, st.tuples(st.integers(1, 70), st.integers(1, 70)), elements=SIZES),
    factors=st.lists(st.sampled_from([1.0, 9.0, 100.0, math.inf, math.nan, 2.0**127]), max_size=9),
    is_wide=st.booleans(),
)
def test_the_bytes_are_those_of_the_cpu_whatever_is_encoded(
    codec: Codec, values: np.ndarray, factors: list[float], is_wide: bool
) -> None:
    tensor = torch.from_numpy(values).clone()
    for channel, factor in enumerate(factors[: tensor.shape[1]]):
        tensor[:, -channel - 1] *= factor
    check_same(tensor if is_wide else tensor.bfloat16(), codec)


def test_of_too_many_equal_channels_the_first_are_taken() -> None:
    values = torch.ones(64, 64)
    values[:, 10:20] = 100.0
    found, count = blockwise.find_without_looking(values)
    assert (found.tolist(), count.item()) == ([10, 11, 12, 13], 4)


@pytest.mark.parametrize("codec", CODECS)
def test_faults_of_what_was_received_can_be_looked_at_later(codec: Codec) -> None:
    values = torch.linspace(-1.0, 1.0, 64 * 64).view(64, 64).clone()
    values[:, [20, 40]] = 500.0
    encoded = encode(values, codec)
    base = TensorSpec(encoded.spec.shape, encoded.spec.dtype, codec).byte_length
    scale = slice(base - (2 if codec is Codec.INT4 else 4), base)
    whole, no_scale, no_channel, no_order = (bytearray(encoded.data) for _ in range(4))
    no_scale[scale] = b"\xff" * (scale.stop - scale.start)
    no_channel[base + 2 : base + 4] = b"\xff\xff"
    no_order[base : base + 2] = no_order[base + 2 : base + 4]
    for data, holds in ((whole, True), (no_scale, False), (no_channel, False), (no_order, False)):
        found: list[bool] = []
        out = torch.empty(64, 64)
        decode(encoded.spec, memoryview(data), out, lambda each, _, found=found: found.append(bool(each)))
        assert all(found) is holds
        if not holds:
            with pytest.raises(ProtocolViolation):
                decode(encoded.spec, memoryview(data), torch.empty(64, 64))


CPU = torch.device("cpu")


def test_without_a_gpu_memory_is_ordinary_and_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(size_bytes: int) -> None:
        raise AssertionError("nothing is to be pinned")

    monkeypatch.setattr(memory, "_pinned", pinned)
    assert isinstance(buffer_for(9, CPU).obj, bytearray)
    octets = torch.arange(9, dtype=torch.uint8)
    assert to_host(octets).data_ptr() == to_device(octets, CPU).data_ptr() == octets.data_ptr()


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
