"""A pretend device."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ROOT: Final = Path(__file__).parent.parent.parent.parent
_COPIES: Final = frozenset({"_to_copy", "copy_"})
_INDEXING: Final = frozenset({"index", "index_put_", "_index_put_impl_"})
_WAITS: Final = frozenset({"_local_scalar_dense", "nonzero", "equal", "masked_select"})

# Once in a process: the name cannot be given twice.
backend_registration._setup_privateuseone_for_python_backend(rename="pretend")
DEVICE: Final = torch.device("pretend", 0)


_pinned: Final[list[np.ndarray]] = []


def pinned(size_bytes: int) -> memoryview:
    """Memory that the device reads by itself; it stays for as long as the process."""
    _pinned.append(np.zeros(size_bytes, np.uint8))
    return _pinned[-1].data


def _is_pinned(tensor: Tensor) -> bool:
    at = tensor.data_ptr()
    return any(each.ctypes.data <= at < each.ctypes.data + each.nbytes for each in _pinned)


class Meter:
    def __init__(self) -> None:
        self.live = 0
        self.peak = 0
        self.waits: Counter[str] = Counter()
        self.copied = 0
        self._holders: Counter[int] = Counter()

    def start(self) -> None:
        self.peak, self.copied = self.live, 0
        self.waits.clear()

    def hold(self, tensor: Tensor) -> None:
        """Counts the memory of a tensor until nothing refers to it any more."""
        storage = tensor._inner.untyped_storage()  # type: ignore[attr-defined]
        place, size = storage.data_ptr(), storage.nbytes()
        if not self._holders[place]:
            self.live += size
            self.peak = max(self.peak, self.live)
        self._holders[place] += 1
        weakref.finalize(tensor, self._release, place, size)

    def _release(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            del self._holders[place]
            self.live -= size

    def waited(self, what: str, copied: int = 0) -> None:
        self.waits[f"{what} at {_line()}"] += 1
        self.copied += copied


METER: Final = Meter()


class Pretend(torch.Tensor):
    """A tensor on the pretend device, which holds one of the CPU."""

    _inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretend:
        self: Pretend = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )
        self._inner = inner
        METER.hold(self)
        return self

    def data_ptr(self) -> int:  # the node tells memory apart by it
        return self._inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._inner.untyped_storage()

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError("can't convert pretend:0 device type tensor to numpy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """For what has no tensor of the device among its arguments: factories and `.to(device)`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def pretended() -> Iterator[Meter]:
    """Makes the device be there, for this thread, and meters it from now on."""
    with _Mode():
        METER.start()
        yield METER


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, device = func.overloadpacket.__name__, kwargs.get("device")
    tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
    ours = {id(each._inner): each for each in tensors if isinstance(each, Pretend)}
    plain = [each for each in tensors if not isinstance(each, Pretend)]
    is_here = device is not None and torch.device(device).type == "pretend"
    if not ours and not is_here:
        return func(*args, **kwargs)
    if ours and name not in _COPIES | _INDEXING and any(each.dim() for each in plain):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found two: aten.{name}")
    _count(name, device, tensors, is_here, bool(kwargs.get("non_blocking")))
    inner_args, inner_kwargs = _mapped(lambda each: each._inner if isinstance(each, Pretend) else each, (args, kwargs))
    if is_here:
        inner_kwargs = {**inner_kwargs, "device": torch.device("cpu")}
    with _disable_current_modes():
        out = func(*inner_args, **inner_kwargs)
    if name == "_to_copy" and device is not None and not is_here:
        return out  # on the CPU
    same = {id(each): each for each in plain} | ours

    def wrapped(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return same[id(each)] if id(each) in same else Pretend(each)

    return _mapped(wrapped, out)


def _leaves(value: Any) -> Iterator[Any]:
    """As torch's `tree_leaves`, for the few types that operators take: a third less time for all jobs together."""
    if isinstance(value, (tuple, list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(change, each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(change, each) for each in value)
    return change(value)


def _count(name: str, device: Any, tensors: list[Tensor], is_here: bool, later: bool) -> None:
    if name in _WAITS:
        METER.waited(name)
    elif name == "_to_copy" and device is not None:
        source = tensors[0]
        if isinstance(source, Pretend) and not is_here and later:
            METER.copied += source.nbytes  # into pinned memory, which torch takes for it; there with the next copy
        elif is_here and later and not isinstance(source, Pretend) and _is_pinned(source):
            METER.copied += source.nbytes  # only begun
        elif isinstance(source, Pretend) != is_here:
            METER.waited("to the device" if is_here else "to the host", source.nbytes)
    elif name == "copy_" and isinstance(tensors[0], Pretend) != isinstance(tensors[1], Pretend):
        METER.waited("to the device" if isinstance(tensors[0], Pretend) else "to the host", tensors[1].nbytes)


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT) and path != Path(__file__) and ".venv" not in path.parts:
            return f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
