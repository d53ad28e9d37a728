"""Who takes part in `benchmarks.codecs`: our codecs and hivemind's, each from a tensor to bytes and back."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

os.environ["QUANTIZATION_THREADS"] = "1"  # hivemind's quantiles, which else take up to 128 threads

import hivemind.compression.quantization as their_quantization
import numpy as np
import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from torch import Tensor

from protocol import codecs
from protocol.interfaces.tensor_spec import TensorSpec
from swarm.vocabulary.types import Codec

WORKAROUND: Final = (
    "hivemind reads lengths with int(np.frombuffer(..., count=1)), which NumPy refuses from 2.4 on; here its "
    "module is given"
    " a numpy whose frombuffer returns the element itself when count is 1"
)


@dataclass(frozen=True, slots=True)
class Sent:
    """What the other side gets."""

    data: bytes | bytearray
    spec: TensorSpec | None = None
    """Ours: what a header of some 30 bytes says. hivemind's is in the data."""


class Contender(Protocol):
    """One codec. `encode` gives what the library hands to its transport, `serialize` makes bytes of that."""

    @property
    def name(self) -> str: ...

    def encode(self, values: Tensor) -> Any: ...

    def serialize(self, encoded: Any) -> Sent: ...

    def received(self, sent: Sent) -> Sent:
        """As the library's own transport gives it."""
        ...

    def decode(self, sent: Sent, out: Tensor) -> Tensor:
        """May write into `out`, which has the right shape and element type."""
        ...


@dataclass(frozen=True, slots=True)
class Ours:
    """`protocol.codecs`, as the node uses it: the encoding's own memory goes to the transport, decoding writes into
    memory that is there."""

    codec: Codec

    @property
    def name(self) -> str:
        return f"skipstone.{self.codec.name}"

    def encode(self, values: Tensor) -> codecs.Encoded:
        return codecs.encode(values, self.codec)

    def serialize(self, encoded: codecs.Encoded) -> Sent:
        return Sent(bytes(encoded.data), encoded.spec)

    def received(self, sent: Sent) -> Sent:
        return Sent(bytearray(sent.data), sent.spec)

    def decode(self, sent: Sent, out: Tensor) -> Tensor:
        assert sent.spec is not None
        codecs.decode(sent.spec, memoryview(sent.data), out)
        return out


@dataclass(frozen=True, slots=True)
class Theirs:
    """One of hivemind's, as its RPCs use it: a protobuf message with the bytes in it."""

    compression: str

    @property
    def name(self) -> str:
        return f"hivemind.{self.compression}"

    def encode(self, values: Tensor) -> Any:
        return serialize_torch_tensor(values, runtime_pb2.CompressionType.Value(self.compression))

    def serialize(self, encoded: Any) -> Sent:
        return Sent(encoded.SerializeToString())

    def received(self, sent: Sent) -> Sent:
        return sent

    def decode(self, sent: Sent, out: Tensor) -> Tensor:
        return deserialize_torch_tensor(runtime_pb2.Tensor.FromString(sent.data))


def contenders() -> list[Contender]:
    """All codecs of both."""
    return [*(Ours(codec) for codec in Codec), *(Theirs(name) for name in runtime_pb2.CompressionType.keys())]  # noqa: SIM118


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or what went wrong in one line."""
    try:
        return call()
    except ImportError:
        return "not installed"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


class _NumPyAsBefore(types.ModuleType):
    """numpy, but for one element `frombuffer` gives the element."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def frombuffer(*arguments: Any, **options: Any) -> Any:
        found = np.frombuffer(*arguments, **options)
        return found[0] if options.get("count") == 1 else found


@contextmanager
def with_workaround() -> Iterator[None]:
    """Makes hivemind's 8-bit codecs decode with NumPy 2.4 and later."""
    their_quantization.np = _NumPyAsBefore("numpy")
    try:
        yield
    finally:
        their_quantization.np = np


def their_decoding_as_it_is() -> dict[str, str]:
    """Of each of hivemind's 8-bit codecs: what decoding does with the NumPy that is installed."""
    values = torch.linspace(-1.0, 1.0, 4096)
    names = [name for name in runtime_pb2.CompressionType.keys() if name.endswith("8BIT")]  # noqa: SIM118
    return {f"hivemind.{name}": _decoded(Theirs(name), values) for name in names}


def _decoded(contender: Theirs, values: Tensor) -> str:
    found = attempt(lambda: contender.decode(contender.serialize(contender.encode(values)), values))
    return found if isinstance(found, str) else "works"
