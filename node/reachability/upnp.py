"""Port mappings by UPnP's Internet Gateway Device, with miniupnpc (the extra `nat`).

The search is our own, because miniupnpc's visits every device that answers: here only the default gateway is listened
to, and its description has to lie on the gateway itself. miniupnpc then reads that description and speaks SOAP.
"""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from node.reachability.port_mapping import Mapping, NotMapped, default_gateway

SEARCH_S: Final = 2.0
DESCRIPTION: Final = "skipstone"
TRIES: Final = 3
"""Ports outside that are tried when others have them already."""

_MULTICAST: Final = "239.255.255.250"
_PORT: Final = 1900
_DEVICES: Final = ("1", "2")
_SEARCH: Final = (
    'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    "ST: urn:schemas-upnp-org:device:InternetGatewayDevice:{}\r\n\r\n"
)
_LOCATION: Final = re.compile(rb"^location:[ \t]*(\S{1,512})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_URL: Final = re.compile(r"http://([0-9.]{7,15})(?::[0-9]{1,5})?/.*")

Search = Callable[[str], str | None]
Connect = Callable[[str], tuple[Any, str]]


class Upnp:
    """A `node.reachability.port_mapping.PortMapper` by UPnP.

    `gateway` finds the router, `search` its description's URL; `connect` reads that and gives miniupnpc's device and
    its control URL.
    """

    how = "UPnP"

    def __init__(
        self,
        gateway: Callable[[], str | None] = default_gateway,
        search: Search | None = None,
        connect: Connect | None = None,
    ) -> None:
        self._gateway = gateway
        self._search = search or description_of
        self._connect = connect or _by_miniupnpc
        self._device: Any = None

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
            if "ConflictInMappingEntry" in failed:
                wanted = random.randrange(20_000, 60_000)  # noqa: S311 - no secret
            elif "OnlyPermanentLeasesSupported" in failed:
                lease = float("inf")
            else:
                break
        self._device = None
        return NotMapped(f"the router said no: {failed}")

    def unmap(self, mapping: Mapping) -> NotMapped | None:
        if self._device is None:
            return NotMapped("the router has not been found")
        try:
            self._device.deleteportmapping(mapping.external_port, "TCP")
        except Exception as error:  # miniupnpc has no type of its own
            return NotMapped(f"the router said no: {error}")
        return None

    def _find(self) -> Any:
        """miniupnpc's device, or NotMapped."""
        gateway = self._gateway()
        if gateway is None:
            return NotMapped("no default gateway is known")
        location = self._search(gateway)
        if location is None:
            return NotMapped(f"the router at {gateway} did not answer the search")
        try:
            device, control = self._connect(location)
        except ImportError:
            return NotMapped(
                f"the router at {gateway} speaks it, but miniupnpc is not installed here (`pip install "
                "'skipstone[nat]'`)"
            )
        except Exception as error:  # miniupnpc has no type of its own
            return NotMapped(f"the router at {gateway} offers no such service: {error}")
        if not leads_to(gateway, control):
            return NotMapped(f"the router at {gateway} sends us elsewhere, to {control[:80]}")
        return device


def leads_to(gateway: str, url: str) -> bool:
    """Whether a URL is an HTTP address on the gateway itself."""
    match = _URL.fullmatch(url)
    return match is not None and match[1] == gateway


def location_in(answer: bytes, gateway: str) -> str | None:
    """The address of the device's description, by its answer to a search; None unless that is on the gateway."""
    match = _LOCATION.search(answer)
    location = "" if match is None else match[1].decode("ascii", "replace")
    return location if leads_to(gateway, location) else None


def description_of(gateway: str, targets: Sequence[tuple[str, int]] | None = None) -> str | None:
    """Searches for the gateway's description (UPnP Device Architecture 1.1, section 1.3) and takes the gateway's own
    answer.

    The question goes to the gateway and to the group that it has to listen to, because many answer only the latter; or
    to `targets`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as searching:
        searching.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        for device in _DEVICES:
            for target in targets or ((gateway, _PORT), (_MULTICAST, _PORT)):
                try:
                    searching.sendto(_SEARCH.format(device).encode(), target)
                except OSError:
                    continue  # no way there; the other may do
        return _first_answer(searching, gateway, time.monotonic() + SEARCH_S)


def _first_answer(searching: socket.socket, gateway: str, deadline: float) -> str | None:
    while (left := deadline - time.monotonic()) > 0:
        searching.settimeout(left)
        try:
            answer, (host, _) = searching.recvfrom(2048)
        except OSError:  # the time is over, or the gateway has said that nobody listens there
            continue
        if host == gateway and (location := location_in(answer, gateway)) is not None:
            return location
    return None


def _by_miniupnpc(location: str) -> tuple[Any, str]:
    import miniupnpc

    device = miniupnpc.UPnP()
    return device, str(device.selectigd(location))


def _add(device: Any, external_port: int, port: int, lease_s: int) -> str | None:
    """Why the router did not take it. The sixth argument is the remote host (any), the seventh the lease."""
    try:
        device.addportmapping(external_port, "TCP", device.lanaddr, port, DESCRIPTION, "", lease_s)
    except Exception as error:  # miniupnpc has no type of its own
        return str(error)[:200]
    return None


def _external_host(device: Any) -> str | None:
    try:
        return str(device.externalipaddress())
    except Exception:  # likewise; it is for people only
        return None
