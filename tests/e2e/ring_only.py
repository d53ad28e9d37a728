"""A node that never has lanes: `python -m tests.e2e.ring_only join ...`, the rest as `skipstone` has it.

Its paths follow the ring by the microbatch's number, and its numbers begin at 0, as one process without a swarm has
them, so that the two can be compared.
"""

from __future__ import annotations

from node.__main__ import main
from node.routing.negotiation_runner import NegotiationRunner
from node.runtime import data_role as data_role


def sees_nobody(self: NegotiationRunner) -> None:
    """In place of a look at the swarm: a data node that never saw one agrees on no lanes."""


def zero(below: int) -> int:
    return 0


if __name__ == "__main__":
    NegotiationRunner._look = sees_nobody  # type: ignore[method-assign]
    data_role.randbelow = zero  # type: ignore[attr-defined]
    main()
