"""The compute devices of one node. The first device's thread gives the others their jobs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Self, TypeVar

import torch

from node.concurrency.task_groups import settle
from node.model.device import flush_denormals

Result = TypeVar("Result")


class DeviceThreads:
    """The devices of one node except the first, each with a thread. CPU devices share the cores."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in devices[1:]]
        self._cores = max(1, torch.get_num_threads() // len(devices))
        self._threads = [
            threading.Thread(target=self._work, args=(queue,), name=f"compute {device}", daemon=True)
            for queue, device in zip(self._queues, devices[1:], strict=True)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(timeout=60.0)

    def set_up(self) -> None:
        """Makes the calling thread flush denormals to zero, and use only its share of the cores."""
        flush_denormals()
        if self.devices[0].type == "cpu":
            torch.set_num_threads(self._cores)

    def settle(self) -> None:
        """Waits until the first device has finished the work that the calling thread queued there."""
        kind = self.devices[0].type
        if kind == "cuda":
            torch.cuda.current_stream(self.devices[0]).synchronize()
        elif kind == "mps":
            torch.mps.synchronize()

    def at_once(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Runs one job per device, the first in the calling thread. Raises the failure that caused the others."""
        futures: list[Future[Result]] = [Future() for _ in jobs]
        for queue, job, future in zip(self._queues, jobs[1:], futures[1:], strict=True):
            queue.put(partial(settle, future, job))
        settle(futures[0], jobs[0])
        failures = [error for future in futures if (error := future.exception()) is not None]
        # A broken barrier is only the consequence of another job's failure.
        for error in sorted(failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _work(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        self.set_up()
        while (job := queue.get()) is not None:
            job()
