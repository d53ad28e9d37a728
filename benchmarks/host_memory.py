"""What rounds and checkpoints take of the host's memory, in bytes a parameter: `benchmarks.memory` runs it.

Replicas that average in one process, as in the tests of rounds, their fragments in turn, until every fragment has moved
twice. Counted is what numpy has allocated (by `tracemalloc`): anchors, the snapshot, anchors in the making, pieces on
their way. A replica's own parameters, gradients and moments belong to its device and are torch's: not counted. "Steady"
is between two rounds, "peak" the most at any moment of a round, with pieces that the wire in memory copies.

A checkpoint is of a stage's module with AdamW, saved by the node's own saver onto a disk while inner steps go on;
counted likewise. What is held is looked at after every piece that is written.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.node.averaging.small_rounds import hall

REPLICAS: Final = 2
FRAGMENTS: Final = 8
ELEMENTS: Final = 2**22


def _held(since: int, parameters: int) -> float:
    gc.collect()
    return round((tracemalloc.get_traced_memory()[0] - since) / parameters, 2)


async def rounds(fragments: int, elements: int = ELEMENTS) -> dict[str, float]:
    """Bytes a parameter and replica, after two turns of all fragments: at rest, and at most in a round."""
    gc.collect()
    since = tracemalloc.get_traced_memory()[0]
    async with hall(REPLICAS, elements=elements, inner_steps=fragments, fragments=fragments) as here:
        for number in range(1, 2 * fragments + 1):
            print(f"round {number} of {2 * fragments}", file=sys.stderr)
            tracemalloc.reset_peak()
            await here.a_round(number, 1)
        await asyncio.sleep(0)
        peak = (tracemalloc.get_traced_memory()[1] - since) / (REPLICAS * elements)
        return {"steady": _held(since, REPLICAS * elements), "peak": round(peak, 2)}


def main() -> None:
    tracemalloc.start(1)
    print(json.dumps({f"{fragments} fragments": asyncio.run(rounds(fragments)) for fragments in (1, FRAGMENTS)}))


if __name__ == "__main__":
    main()
