"""A node on an emulated device, on which a visit takes as long as its documents cost, and its arm of the benchmark:
`python -m benchmarks.workload_node SPEC join ...`, the rest as `skipstone` has it.

A swarm of several replicas a stage needs more cores than the machine may have: the compute thread sleeps for the rest
of the emulated time, so that the device is busy and the core is not. It stands alone because it is a process of its
own, an arm of `benchmarks.workload_swarm`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

from benchmarks import concat_node
from node.__main__ import main
from node.data import feed as feed
from node.pipeline.runner import Job
from node.pipeline.worker import HopWorker
from swarm.pipeline.custody_events import Work
from swarm.workload.microbatch_sizes import Size
from tests.e2e.emulated import lasting

FACTORS = {Work.FORWARD: 1.0, Work.BACKWARD: 2.0, Work.REPLAY: 3.0}


@dataclass(frozen=True, slots=True)
class Spec:
    """The device, and how a data node packs."""

    token_s: float
    """Of the way out of one token without attention."""
    share: float
    """`protocol.manifest.model.quadratic_share`."""
    tokens: int
    """Of a microbatch that is rows of one stream."""
    sequence: int
    window: int
    """Microbatches under way: a whole step, so that none waits for the window to be found."""
    concat: bool

    def seconds(self, documents: tuple[int, ...]) -> float:
        """The time of a microbatch's way out; rows see all that is before them."""
        lengths = documents or (self.sequence,) * (self.tokens // self.sequence)
        return self.token_s * sum(tokens + self.share * tokens**2 for tokens in lengths)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def emulate(spec: Spec) -> None:
    """Before the node starts."""

    def seconds_of(job: Job, put_off: int) -> float:
        return FACTORS[job.work] * spec.seconds(job.documents)

    def timed(self: HopWorker, size: Size, seconds: float) -> None:
        lasted = FACTORS[Work.REPLAY] * spec.seconds(size.documents)
        self._cost.add(size.tokens, size.squares, len(size.documents), lasted)

    HopWorker.compute = lasting(HopWorker.compute, seconds_of)  # type: ignore[method-assign]
    HopWorker._timed = timed  # type: ignore[method-assign]
    sys.argv += ["--window", str(spec.window)]
    if spec.concat:
        feed.DocumentPacker = concat_node.ConcatPacker  # type: ignore[misc]


if __name__ == "__main__":
    emulate(Spec(**json.loads(sys.argv.pop(1))))
    main()
