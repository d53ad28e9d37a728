"""Port mappings of the router by NAT-PMP and UPnP. Functions return expected failures as values with a reason."""

import asyncio
import logging
import random
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from node.concurrency.task_groups import aside

log = logging.getLogger(__name__)

LEASE_S: Final = 600  # A dead machine's mapping expires
ASK_ROUTER_S: Final = 15.0  # Per protocol
_HAS_GATEWAY: Final = 2  # RTF_GATEWAY of Linux's <linux/route.h>


@dataclass(frozen=True, slots=True)
class Mapping:
    """A TCP port of the router that leads to a port of this machine."""

    how: str  # `UPnP` or `NAT-PMP`
    internal_port: int
    external_port: int
    external_host: str | None  # As the router claims
    lease_s: float  # Seconds; infinite without a lease


@dataclass(frozen=True, slots=True)
class NotMapped:
    """The reason why no port is mapped, for a person."""

    reason: str


@dataclass(slots=True, eq=False)
class Router:
    """Port mapping of this machine's router, by the first protocol that works. Not for concurrent use; call `close`."""

    # First NAT-PMP: it needs no library and asks only the gateway
    mappers: "Sequence[NatPmp | Upnp]" = field(default_factory=lambda: (NatPmp(), Upnp()))
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    now: Callable[[], float] = time.monotonic
    lease_s: int = LEASE_S
    mapping: Mapping | None = field(default=None, init=False)
    _asked_at: float = field(default=0.0, init=False)
    _used: "NatPmp | Upnp | None" = field(default=None, init=False)

    async def open(self, port: int) -> Mapping | NotMapped:
        """Maps this machine's port by the first protocol that works."""
        await self.close()
        reasons = []
        for mapper in self.mappers:
            answer = await self._ask(mapper, port, port)
            if isinstance(answer, Mapping):
                self._used, self.mapping = mapper, answer
                return answer
            reasons.append(f"{mapper.how}: {answer.reason}")
        return NotMapped("; ".join(reasons) or "no mapping protocol is available")

    async def keep(self) -> NotMapped:
        """Renews the mapping at 1/2 and 3/4 of its lease. Returns once it is lost."""
        while (held := self.mapping) is not None and (mapper := self._used) is not None:
            lease_s = min(held.lease_s, self.lease_s)  # renew even an endless lease: routers restart
            await self.sleep(max(0.0, self._asked_at + lease_s / 2 - self.now()))
            answer = await self._ask(mapper, held.internal_port, held.external_port)
            if isinstance(answer, NotMapped):
                log.info("cannot renew the mapping of port %d yet: %s", held.internal_port, answer.reason)
                await self.sleep(lease_s / 4)
                answer = await self._ask(mapper, held.internal_port, held.external_port)
            if isinstance(answer, NotMapped):
                self.mapping = None
                return NotMapped(f"the router did not renew the mapping: {answer.reason}")
            self.mapping = answer
            if answer.external_port != held.external_port:
                return NotMapped(f"the router moved the mapping to port {answer.external_port}")
        return NotMapped("nothing is mapped")

    async def close(self) -> None:
        """Removes the mapping, if any. If that fails, the mapping ends with its lease."""
        held, mapper, self.mapping = self.mapping, self._used, None
        if held is None or mapper is None:
            return
        try:
            failed = await aside(lambda: mapper.unmap(held), 3.0)
        except TimeoutError:
            failed = NotMapped("the router did not answer in time")
        except OSError as error:
            failed = NotMapped(str(error.strerror or error))
        if failed is not None:
            text = "port %d of the router stays mapped for up to %.0f s: %s"
            log.info(text, held.external_port, held.lease_s, failed.reason)

    async def _ask(self, mapper: "NatPmp | Upnp", port: int, external_port: int) -> Mapping | NotMapped:
        began = self.now()
        try:
            answer = await aside(lambda: mapper.map(port, external_port, self.lease_s), ASK_ROUTER_S)
        except TimeoutError:
            return NotMapped(f"no answer within {ASK_ROUTER_S:g} s")
        except OSError as error:
            return NotMapped(f"cannot ask the router: {error.strerror or error}")
        if isinstance(answer, Mapping):
            self._asked_at = began
        return answer


def default_gateway(routes: Path = Path("/proc/net/route")) -> str | None:
    """Returns the IPv4 gateway with the lowest metric in Linux's route table; None on other systems."""
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


PORT: Final = 5351
WAITS_S: Final = (0.25, 0.5, 1.0, 2.0)  # First waits of RFC 6886, section 3.1

_ASK_ADDRESS: Final = 0
_MAP_TCP: Final = 2
_ANSWERS: Final = 128
_RESULTS: Final = dict(
    enumerate(("wrong version", "mapping is disabled", "no external address", "no free ports", "cannot map TCP"), 1)
)


@dataclass(frozen=True, eq=False)
class NatPmp:
    """Port mappings by NAT-PMP (RFC 6886). `gateway` finds the router; `port` is for tests."""

    # Methods block for seconds at most, raise only OSError, and run in a thread.
    how: ClassVar[str] = "NAT-PMP"
    gateway: Callable[[], str | None] = default_gateway
    port: int = PORT

    def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
        """Maps this machine's TCP port or renews the mapping. The router may choose another external port."""
        answer = self._ask(_map_request(port, external_port, lease_s), 16)
        if isinstance(answer, NotMapped):
            return answer
        internal, external, lease = struct.unpack("!HHI", answer[8:16])
        if internal != port or external == 0 or lease == 0:  # external port 0 or lease 0 would mean a deletion
            return NotMapped(f"the router answered nonsense: port {internal} as {external} for {lease} s")
        return Mapping(self.how, port, external, self._external_host(), lease)

    def unmap(self, mapping: Mapping) -> NotMapped | None:
        """Removes the mapping; returns the reason if that fails."""
        answer = self._ask(_map_request(mapping.internal_port, 0, 0), 16)
        return answer if isinstance(answer, NotMapped) else None

    def _external_host(self) -> str | None:
        answer = self._ask(bytes((0, _ASK_ADDRESS)), 12)
        return None if isinstance(answer, NotMapped) else socket.inet_ntoa(answer[8:12])

    def _ask(self, request: bytes, length: int) -> bytes | NotMapped:
        gateway = self.gateway()
        if gateway is None:
            return NotMapped("no default gateway is known")
        try:
            answer = _exchange(gateway, self.port, request)
        except OSError as error:
            return NotMapped(f"the router at {gateway} does not support it ({error.strerror or error})")
        if answer is None:
            return NotMapped(f"the router at {gateway} did not answer")
        if len(answer) < 4 or answer[0] != 0 or answer[1] != _ANSWERS + request[1]:
            return NotMapped(f"the router at {gateway} sent an unexpected answer")
        result = struct.unpack("!H", answer[2:4])[0]
        if result != 0:
            return NotMapped(f"the router at {gateway} refused: {_RESULTS.get(result, f'result {result}')}")
        if len(answer) != length:
            return NotMapped(f"the router at {gateway} sent {len(answer)} bytes instead of {length}")
        return answer


def _map_request(port: int, external_port: int, lease_s: int) -> bytes:
    return struct.pack("!BBHHHI", 0, _MAP_TCP, 0, port, external_port, lease_s)


def _exchange(gateway: str, port: int, request: bytes) -> bytes | None:
    """Sends the request to the gateway, again after each timeout. Returns the gateway's answer, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((gateway, port))
        for wait_s in WAITS_S:
            asking.settimeout(wait_s)
            asking.send(request)
            try:
                return asking.recv(64)
            except TimeoutError:
                continue
    return None


SEARCH_S: Final = 2.0
TRIES: Final = 3  # External ports to try

_PORT: Final = 1900
_SEARCH: Final = (
    'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    "ST: urn:schemas-upnp-org:device:InternetGatewayDevice:{}\r\n\r\n"
)
_LOCATION: Final = re.compile(rb"^location:[ \t]*(\S{1,512})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_URL: Final = re.compile(r"http://([0-9.]{7,15})(?::[0-9]{1,5})?/.*")


def leads_to(gateway: str, url: str) -> bool:
    match = _URL.fullmatch(url)
    return match is not None and match[1] == gateway


def location_in(answer: bytes, gateway: str) -> str | None:
    """Extracts the URL of the device's description from a search answer; None unless it is on the gateway."""
    match = _LOCATION.search(answer)
    location = "" if match is None else match[1].decode("ascii", "replace")
    return location if leads_to(gateway, location) else None


def description_of(gateway: str, targets: Sequence[tuple[str, int]] | None = None) -> str | None:
    """Searches for the URL of the gateway's UPnP description (Device Architecture 1.1, section 1.3)."""
    # Many gateways answer only at the multicast group. Tests replace both by `targets`.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as searching:
        searching.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        for device in ("1", "2"):
            for target in targets or ((gateway, _PORT), ("239.255.255.250", _PORT)):
                try:
                    searching.sendto(_SEARCH.format(device).encode(), target)
                except OSError:
                    continue  # no route; the other target may work
        return _first_answer(searching, gateway, time.monotonic() + SEARCH_S)


def _first_answer(searching: socket.socket, gateway: str, deadline: float) -> str | None:
    while (left := deadline - time.monotonic()) > 0:
        searching.settimeout(left)
        try:
            answer, (host, _) = searching.recvfrom(2048)
        except OSError:  # timeout, or an ICMP error from the gateway
            continue
        if host == gateway and (location := location_in(answer, gateway)) is not None:
            return location
    return None


def _by_miniupnpc(location: str) -> tuple[Any, str]:
    import miniupnpc

    device = miniupnpc.UPnP()
    return device, str(device.selectigd(location))


def _add(device: Any, external_port: int, port: int, lease_s: int) -> str | None:
    """Adds a mapping; returns the router's refusal. The empty argument means any remote host."""
    try:
        device.addportmapping(external_port, "TCP", device.lanaddr, port, "skipstone", "", lease_s)
    except Exception as error:  # miniupnpc has no exception type
        return str(error)[:200]
    return None


def _external_host(device: Any) -> str | None:
    try:
        return str(device.externalipaddress())
    except Exception:  # no exception type either; the address is only for people
        return None


# The search is ours, because miniupnpc would visit every device that answers. Only the default gateway is heard, and
# its description must be on the gateway itself.
@dataclass(eq=False)
class Upnp:
    """Port mappings by UPnP with miniupnpc. `connect` reads a description's URL; returns device and control URL."""

    how: ClassVar[str] = "UPnP"
    gateway: Callable[[], str | None] = default_gateway
    search: Callable[[str], str | None] = description_of
    connect: Callable[[str], tuple[Any, str]] = _by_miniupnpc
    _device: Any = None

    def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
        device = self._device or self._find()
        if isinstance(device, NotMapped):
            return device
        wanted, lease = external_port, float(lease_s)
        for _ in range(TRIES):
            failed = _add(device, wanted, port, int(lease) if lease < float("inf") else 0)
            if failed is None:
                self._device = device
                return Mapping(self.how, port, wanted, _external_host(device), lease)
            if "ConflictInMappingEntry" in failed:  # another machine holds the port: try a random one
                wanted = random.randrange(20_000, 60_000)  # noqa: S311 - not a secret
            # Some routers know only endless mappings; `close` removes them.
            elif "OnlyPermanentLeasesSupported" in failed:
                lease = float("inf")
            else:
                break
        self._device = None
        return NotMapped(f"the router refused: {failed}")

    def unmap(self, mapping: Mapping) -> NotMapped | None:
        if self._device is None:
            return NotMapped("the router was not found")
        try:
            self._device.deleteportmapping(mapping.external_port, "TCP")
        except Exception as error:  # miniupnpc has no exception type
            return NotMapped(f"the router refused: {error}")
        return None

    def _find(self) -> Any:
        gateway = self.gateway()
        if gateway is None:
            return NotMapped("no default gateway is known")
        location = self.search(gateway)
        if location is None:
            return NotMapped(f"the router at {gateway} did not answer the search")
        try:
            device, control = self.connect(location)
        except ImportError:
            missing = "miniupnpc is not installed here (`pip install 'skipstone[nat]'`)"
            return NotMapped(f"the router at {gateway} supports it, but {missing}")
        except Exception as error:  # miniupnpc has no exception type
            return NotMapped(f"the router at {gateway} offers no mapping service: {error}")
        if not leads_to(gateway, control):
            return NotMapped(f"the router at {gateway} points to another host: {control[:80]}")
        return device
