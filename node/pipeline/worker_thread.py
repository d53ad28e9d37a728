"""The event loop's access to a replica's worker on the compute thread. It stands between the two so that neither the
runner of microbatches knows of threads nor a worker of asyncio.
"""

from __future__ import annotations

from collections.abc import Callable

from node.concurrency.compute_thread import ComputeThread, Priority
from node.model.optimizer import StepFigures
from node.pipeline.interfaces import Job, Output, Worker
from protocol.interfaces.clock import Clock
from protocol.interfaces.tensor_spec import TensorSpec
from swarm.vocabulary.pipeline_messages import Purpose


class WorkerThread:
    """Runs a worker's calls on the compute thread. Errors are those of the worker and of `ComputeThread.run`.

    Args:
        after_step: called on the thread after each inner step, in the same job.
        allocate: makes memory of so many bytes for what the worker is sent; ordinary memory if it is not given.
    """

    def __init__(
        self,
        worker: Worker,
        compute: ComputeThread,
        clock: Clock,
        after_step: Callable[[StepFigures], None] = lambda figures: None,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        self.allocate = allocate
        self._worker = worker
        self._compute = compute
        self._clock = clock
        self._after_step = after_step

    @property
    def tensor(self) -> TensorSpec:
        """The specification of the hidden states and their gradients."""
        return self._worker.tensor

    def expect(self, jobs: tuple[float, ...]) -> None:
        """Sets when jobs are expected; see `ComputeThread.expect`."""
        self._compute.expect(jobs)

    async def compute(self, job: Job) -> tuple[Output, float]:
        """Computes a job; returns the output, and the seconds that it took on the thread."""

        def timed() -> tuple[Output, float]:
            begun = self._clock.monotonic()
            return self._worker.compute(job), self._clock.monotonic() - begun

        return await self._compute.run(Priority.EVALUATE if job.purpose is Purpose.EVALUATE else Priority.TRAIN, timed)

    async def retract(self, job: Job) -> bool:
        return await self._compute.run(Priority.TRAIN, lambda: self._worker.retract(job))

    async def forget(self, ticket: int) -> None:
        await self._compute.run(Priority.UPKEEP, lambda: self._worker.forget(ticket))

    async def step(self) -> StepFigures | None:
        def step() -> StepFigures | None:
            figures = self._worker.step()
            if figures is not None:
                self._after_step(figures)
            return figures

        return await self._compute.run(Priority.UPKEEP, step)
