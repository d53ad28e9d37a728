"""A plan in a world whose uplinks are servers of their own: a peer sends one message at a time, in the order in which
they are ready. At home that is how it is, where a line is slow in one direction and serves several hops.

It stands alone because neither planner nor forecast believes it: it is there to tell what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swarm.routing.cost_model import Costs, PeerRoute
from swarm.simulation.forecast import Forecast, Unit, _Play
from swarm.simulation.generate import HANDLING_S
from swarm.vocabulary.types import PeerId


def uplink_s(costs: Costs) -> dict[PeerId, float]:
    """How long a message keeps each peer's uplink busy: what its fastest message takes, less the handling at both ends.
    Its latency counts as sending then, which at home is some hundredths of a second of several."""
    return {
        peer: max(0.0, min((seconds for there, seconds in row.items() if there != peer), default=0.0) - HANDLING_S)
        for peer, row in costs.message_s.items()
    }


def forecast_over_uplinks(
    costs: Costs, plan: Mapping[PeerId, Sequence[PeerRoute]], busy_s: Mapping[PeerId, float]
) -> Forecast:
    """What `swarm.simulation.forecast.forecast` says, but a message waits until those that its sender sent before have
    left.

    Args:
        busy_s: how long each peer's uplink takes for one message; it is part of `costs.message_s`.
    """
    return _PlayOverUplinks(costs, plan, busy_s).run()


class _PlayOverUplinks(_Play):
    def __init__(
        self, costs: Costs, plan: Mapping[PeerId, Sequence[PeerRoute]], busy_s: Mapping[PeerId, float]
    ) -> None:
        super().__init__(costs, plan)
        self._busy_s = busy_s
        self._uplink_free_at: dict[PeerId, float] = {}
        self._sends = (PeerId(""), 0.0)

    def _finished(self, peer: PeerId, unit: Unit, position: int, now: float) -> None:
        self._sends = (peer, now)
        super()._finished(peer, unit, position, now)

    def _push(self, when: float, peer: PeerId, unit: Unit | None, position: int) -> None:
        if unit is not None and position > 0:  # it arrives there
            sender, now = self._sends
            starts = max(now, self._uplink_free_at.get(sender, now))
            self._uplink_free_at[sender] = starts + self._busy_s.get(sender, 0.0)
            when += starts - now
        super()._push(when, peer, unit, position)
