"""How long codecs take, in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.codecs_contenders import Contender, attempt

Times = dict[str, list[tuple[float, float]]]
"""Of each operation, a turn: seconds by the clock, seconds of the processor."""

SLOW_S: Final = 0.02
"""Longer ones do not depend on what is in the caches before."""


class Bench:
    """One contender with one tensor. What does not work says why in `problem`."""

    def __init__(self, contender: Contender, values: Tensor) -> None:
        self.contender = contender
        self.times: Times = defaultdict(list)
        self._quickest: dict[str, float] = defaultdict(lambda: math.inf)
        self._values = values
        self._out = torch.empty_like(values)
        prepared = attempt(self._prepare)
        self.problem = prepared if isinstance(prepared, str) else ""

    def take_turn(self) -> None:
        """Each operation once with caches as the others left them, which does not count where it would show, and once
        more."""
        calls: dict[str, Callable[[], Any]] = {
            "encode": lambda: self.contender.encode(self._values),
            "encode_to_bytes": lambda: self.contender.serialize(self.contender.encode(self._values)),
            "decode": lambda: self.contender.decode(self._received, self._out),
            "decode_from_bytes": lambda: self.contender.decode(self._sent, self._out),
        }
        # Whoever frees memory first gives back to the system what the contender before has left behind.
        for name in ("encode", "encode", "decode"):
            calls[name]()
        for name, call in calls.items():
            first = _timed(call)
            self._quickest[name] = min(first[0], self._quickest[name])
            self.times[name].append(first if self._quickest[name] > SLOW_S else _timed(call))

    def figures(self) -> dict[str, Any]:
        """GB (10**9 bytes of the tensor) a second: the median by the clock, the fastest, and the median of the
        processor's time."""
        if self.problem:
            return {"problem": self.problem}
        size = self._values.nbytes / 1e9
        found: dict[str, Any] = {}
        for name, times in self.times.items():
            wall, processor = [pair[0] for pair in times], [pair[1] for pair in times]
            found[f"{name}_gbps"] = round(size / statistics.median(wall), 3)
            found[f"{name}_best_gbps"] = round(size / min(wall), 3)
            found[f"{name}_cpu_gbps"] = round(size / statistics.median(processor), 3)
        return found

    def _prepare(self) -> None:
        self._sent = self.contender.serialize(self.contender.encode(self._values))
        self._received = self.contender.received(self._sent)
        self.contender.decode(self._received, self._out)


def measured(contenders: Sequence[Contender], title: str, values: Tensor, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of each contender by its name."""
    benches = [Bench(contender, values) for contender in contenders]
    running = [bench for bench in benches if not bench.problem]
    for number in range(1, repeats + 1):
        begun = time.monotonic()
        for bench in running:
            bench.take_turn()
        print(f"{title}: turn {number} of {repeats}, {time.monotonic() - begun:.1f} s", file=sys.stderr)
    return {bench.contender.name: bench.figures() for bench in benches}


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    processor, wall = time.process_time(), time.perf_counter()
    result = call()
    _settle(result)
    return time.perf_counter() - wall, time.process_time() - processor


def _settle(result: Any) -> None:
    """Waits for the device that the result is on."""
    if isinstance(result, Tensor) and result.device.type == "cuda":
        torch.cuda.synchronize()
