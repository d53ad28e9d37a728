"""Port mappings of the router: the seam behind which UPnP and NAT-PMP stand, and one mapping kept alive.

Everything that goes wrong here is to be expected (most routers cannot or will not), so it is a value with a reason and
not an error.

The default gateway: the router of a home. Nobody else is asked for a port.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from node.concurrency.daemon_thread import aside

log = logging.getLogger(__name__)

LEASE_S: Final = 600
"""What is forgotten, because this machine died, closes by itself after that."""
ASK_ROUTER_S: Final = 15.0
"""For one way of asking; its own time limits are shorter."""
CLOSE_S: Final = 3.0
_HAS_GATEWAY: Final = 2
"""RTF_GATEWAY of Linux's <linux/route.h>."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A TCP port of the router that leads to a port of this machine."""

    how: str
    """`UPnP` or `NAT-PMP`."""
    internal_port: int
    external_port: int
    external_host: str | None
    """The router's own address outside as it says; None when it does not."""
    lease_s: float
    """Seconds until the router forgets it; infinite where it forgets nothing."""


@dataclass(frozen=True, slots=True)
class NotMapped:
    """The failure to get a mapping; `reason` says why, for a person."""

    reason: str


class PortMapper(Protocol):
    """A protocol for port mappings. The methods block, for seconds at most, and raise nothing: they are called in a
    thread of their own.
    """

    @property
    def how(self) -> str: ...

    def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
        """Maps this machine's TCP port, or renews that; the router may choose another port outside than
        `external_port`."""
        ...

    def unmap(self, mapping: Mapping) -> NotMapped | None:
        """Takes the mapping back; says why if it cannot."""
        ...


class Router:
    """The mapping of one port, asked for in the given ways one after the other. Used by one task at a time; `close` at
    the end.

    `sleep` waits for so many seconds, `now` is in monotonic ones.
    """

    def __init__(
        self,
        mappers: Sequence[PortMapper],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
        lease_s: int = LEASE_S,
    ) -> None:
        self._mappers = mappers
        self._sleep = sleep
        self._now = now
        self._lease_s = lease_s
        self._asked_at = 0.0
        self._used: PortMapper | None = None
        self.mapping: Mapping | None = None

    async def open(self, port: int) -> Mapping | NotMapped:
        """Gets a mapping of this machine's port, by the first way that works."""
        await self.close()
        reasons = []
        for mapper in self._mappers:
            answer = await self._ask(mapper, port, port)
            if isinstance(answer, Mapping):
                self._used, self.mapping = mapper, answer
                return answer
            reasons.append(f"{mapper.how}: {answer.reason}")
        return NotMapped("; ".join(reasons) or "no way of asking the router is known")

    async def keep(self) -> NotMapped:
        """Renews the mapping at half its lease, and once more at three quarters where that fails. Returns when it is
        lost.

        May be cancelled and called again: it goes on where it was.
        """
        while (held := self.mapping) is not None and (mapper := self._used) is not None:
            lease_s = min(held.lease_s, self._lease_s)  # what has no end is asked for again too: routers restart
            await self._sleep(max(0.0, self._asked_at + lease_s / 2 - self._now()))
            answer = await self._ask(mapper, held.internal_port, held.external_port)
            if isinstance(answer, NotMapped):
                log.info("the mapping of port %d is not renewed yet: %s", held.internal_port, answer.reason)
                await self._sleep(lease_s / 4)
                answer = await self._ask(mapper, held.internal_port, held.external_port)
            if isinstance(answer, NotMapped):
                self.mapping = None
                return NotMapped(f"the router does not renew the mapping: {answer.reason}")
            self.mapping = answer
            if answer.external_port != held.external_port:
                return NotMapped(f"the router has moved the mapping to port {answer.external_port}")
        return NotMapped("nothing is mapped")

    async def close(self) -> None:
        """Takes the mapping back, if there is one; if that fails, its lease ends it."""
        held, mapper, self.mapping = self.mapping, self._used, None
        if held is None or mapper is None:
            return
        try:
            failed = await aside(lambda: mapper.unmap(held), CLOSE_S)
        except TimeoutError:
            failed = NotMapped("the router did not answer in time")
        except OSError as error:
            failed = NotMapped(str(error.strerror or error))
        if failed is not None:
            log.info(
                "port %d of the router stays mapped for at most %.0f s: %s",
                held.external_port,
                held.lease_s,
                failed.reason,
            )

    async def _ask(self, mapper: PortMapper, port: int, external_port: int) -> Mapping | NotMapped:
        began = self._now()
        try:
            answer = await aside(lambda: mapper.map(port, external_port, self._lease_s), ASK_ROUTER_S)
        except TimeoutError:
            return NotMapped(f"no answer within {ASK_ROUTER_S:g} s")
        except OSError as error:
            return NotMapped(f"it cannot be asked: {error.strerror or error}")
        if isinstance(answer, Mapping):
            self._asked_at = began
        return answer


ROUTES: Final = Path("/proc/net/route")


def default_gateway(routes: Path = ROUTES) -> str | None:
    """The gateway's IPv4 address by Linux's table of routes, the one with the lowest metric; None elsewhere, and where
    there is none.
    """
    try:
        lines = routes.read_text().splitlines()[1:]
    except OSError:
        return None
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000" and int(fields[3], 16) & _HAS_GATEWAY:
            found.append((int(fields[6]), socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))))
    return min(found)[1] if found else None
