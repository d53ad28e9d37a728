"""A client of NAT-PMP (RFC 6886): two datagrams to the gateway. A client of our own, because the kept libraries have
none and it is this short.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Final

from node.reachability.port_mapping import Mapping, NotMapped, default_gateway

PORT: Final = 5351
WAITS_S: Final = (0.25, 0.5, 1.0, 2.0)
"""The RFC's first waits (section 3.1); its nine would take a minute for a router that does not speak it."""

_ASK_ADDRESS: Final = 0
_MAP_TCP: Final = 2
_ANSWERS: Final = 128
_RESULTS: Final = {
    1: "it does not speak this version",
    2: "it refuses: mapping is switched off",
    3: "it has no address outside",
    4: "it has no ports left",
    5: "it cannot map TCP",
}


class NatPmp:
    """A `node.reachability.port_mapping.PortMapper` by NAT-PMP. `gateway` finds the router, `port` is for tests."""

    how = "NAT-PMP"

    def __init__(self, gateway: Callable[[], str | None] = default_gateway, port: int = PORT) -> None:
        self._gateway = gateway
        self._port = port

    def map(self, port: int, external_port: int, lease_s: int) -> Mapping | NotMapped:
        answer = self._ask(_map_request(port, external_port, lease_s), 16)
        if isinstance(answer, NotMapped):
            return answer
        internal, external, lease = struct.unpack("!HHI", answer[8:16])
        if internal != port or external == 0 or lease == 0:
            return NotMapped(f"the router's answer makes no sense: port {internal} as {external} for {lease} s")
        return Mapping(self.how, port, external, self._external_host(), lease)

    def unmap(self, mapping: Mapping) -> NotMapped | None:
        answer = self._ask(_map_request(mapping.internal_port, 0, 0), 16)
        return answer if isinstance(answer, NotMapped) else None

    def _external_host(self) -> str | None:
        answer = self._ask(bytes((0, _ASK_ADDRESS)), 12)
        return None if isinstance(answer, NotMapped) else socket.inet_ntoa(answer[8:12])

    def _ask(self, request: bytes, length: int) -> bytes | NotMapped:
        """The router's good answer of `length` bytes."""
        gateway = self._gateway()
        if gateway is None:
            return NotMapped("no default gateway is known")
        try:
            answer = _exchange(gateway, self._port, request)
        except OSError as error:
            return NotMapped(f"the router at {gateway} does not speak it ({error.strerror or error})")
        if answer is None:
            return NotMapped(f"the router at {gateway} did not answer")
        if len(answer) < 4 or answer[0] != 0 or answer[1] != _ANSWERS + request[1]:
            return NotMapped(f"the router at {gateway} gave an answer of another kind")
        result = struct.unpack("!H", answer[2:4])[0]
        if result != 0:
            return NotMapped(f"the router at {gateway} said no: {_RESULTS.get(result, f'result {result}')}")
        if len(answer) != length:
            return NotMapped(f"the router at {gateway} gave {len(answer)} bytes instead of {length}")
        return answer


def _map_request(port: int, external_port: int, lease_s: int) -> bytes:
    return struct.pack("!BBHHHI", 0, _MAP_TCP, 0, port, external_port, lease_s)


def _exchange(gateway: str, port: int, request: bytes) -> bytes | None:
    """Asks again after each wait. A connected socket hears nobody but the gateway."""
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
