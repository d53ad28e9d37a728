"""A short stay in a run's network, to ask or to fetch something without taking part."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from node.clock import SystemClock
from node.events import Event
from node.presence import Presence, Whereabouts, present
from protocol.directory import DirectorySettings
from protocol.identity import Identity
from protocol.join_link import JoinLink


class _Silent:
    """Takes events and keeps none: a visitor reports its result only."""

    def emit(self, event: Event) -> None:
        return


def visit(
    link: JoinLink,
    listen: str = "0.0.0.0",  # noqa: S104 - it may be reached by whoever it asks
    port: int = 0,
) -> AbstractAsyncContextManager[Presence]:
    """A visitor's presence on this machine: any port unless one is given, a key of its own, and nothing kept for others in the DHT."""
    where = Whereabouts(listen=listen, port=port)
    settings = DirectorySettings(where.listen, 0, (), link.peers, client=True)
    return present(Identity.generate(), link.run, where, settings, SystemClock(), _Silent())
