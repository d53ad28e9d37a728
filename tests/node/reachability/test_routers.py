"""NAT-PMP and UPnP against a gateway on the loopback that says what a test wants."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from node.reachability.port_mapping import (
    Mapping,
    NatPmp,
    NotMapped,
    Upnp,
    default_gateway,
    description_of,
    leads_to,
    location_in,
)

HERE = "127.0.0.1"
PORT = 4002
OK = 0


@contextmanager
def gateway(answer: Callable[[bytes], bytes | None]) -> Iterator[int]:
    """A UDP port that answers as told; None is no answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((HERE, 0))
        listening.settimeout(0.05)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                try:
                    request, asker = listening.recvfrom(2048)
                except TimeoutError:
                    continue
                reply = answer(request)
                if reply is not None:
                    listening.sendto(reply, asker)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            serving.join()


def rfc(request: bytes, *, result: int = OK, external: int = 0, lease: int = 600) -> bytes:
    """What RFC 6886 has a router answer."""
    if request == b"\x00\x00":
        return struct.pack("!BBHI4s", 0, 128, result, 7, socket.inet_aton("25.0.0.1"))
    _, op, _, internal, wanted, _ = struct.unpack("!BBHHHI", request)
    return struct.pack("!BBHIHHI", 0, 128 + op, result, 7, internal, external or wanted, lease)


def test_nat_pmp_maps_renews_and_takes_back() -> None:
    asked: list[bytes] = []

    def answer(request: bytes) -> bytes:
        asked.append(request)
        return rfc(request, external=50_000)

    with gateway(answer) as port:
        way = NatPmp(lambda: HERE, port)
        mapped = way.map(PORT, PORT, 600)
        assert mapped == Mapping("NAT-PMP", PORT, 50_000, "25.0.0.1", 600)
        assert way.unmap(mapped) is None
    assert asked[0] == struct.pack("!BBHHHI", 0, 2, 0, PORT, PORT, 600)
    assert asked[-1] == struct.pack("!BBHHHI", 0, 2, 0, PORT, 0, 0), "a lifetime and a port of 0 end it"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda request: rfc(request, result=2), "refuses"),
        (lambda request: rfc(request, result=99), "result 99"),
        (lambda request: b"", "another kind"),
        (lambda request: b"\x00\x82\x00\x00", "4 bytes"),
        (lambda request: rfc(request)[:-4], "12 bytes"),
        (lambda request: b"\x01" + rfc(request)[1:], "another kind"),
        (lambda request: rfc(request, lease=0), "no sense"),
        (lambda request: rfc(struct.pack("!BBHHHI", 0, 2, 0, 9, 9, 9)), "no sense"),
    ],
)
def test_nat_pmp_takes_no_other_answer(answer: Callable[[bytes], bytes], why: str) -> None:
    with gateway(answer) as port:
        mapped = NatPmp(lambda: HERE, port).map(PORT, PORT, 600)
    assert isinstance(mapped, NotMapped)
    assert why in mapped.reason


def test_a_router_that_does_not_speak_nat_pmp(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind((HERE, 0))
        port = closed.getsockname()[1]
    refused = NatPmp(lambda: HERE, port).map(PORT, PORT, 600)
    assert isinstance(refused, NotMapped)
    assert "does not speak it" in refused.reason
    monkeypatch.setattr("node.reachability.port_mapping.WAITS_S", (0.01, 0.01))
    asked: list[bytes] = []
    with gateway(lambda request: asked.append(request)) as silent:
        unanswered = NatPmp(lambda: HERE, silent).map(PORT, PORT, 600)
        assert isinstance(unanswered, NotMapped)
        assert "did not answer" in unanswered.reason
    assert isinstance(NatPmp(lambda: None).map(PORT, PORT, 600), NotMapped)


# ---- UPnP ----------------------------------------------------------------------------------------------------------


class Device:
    """miniupnpc's device as far as it is used; `refusals` come before it agrees."""

    lanaddr = "192.168.1.10"

    def __init__(self, *refusals: str) -> None:
        self.refusals = list(refusals)
        self.added: list[tuple[Any, ...]] = []
        self.deleted: list[tuple[int, str]] = []

    def addportmapping(self, *arguments: Any) -> bool:
        self.added.append(arguments)
        if self.refusals:
            raise Exception(self.refusals.pop(0))
        return True

    def deleteportmapping(self, port: int, protocol: str) -> bool:
        self.deleted.append((port, protocol))
        return True

    def externalipaddress(self) -> str:
        return "25.0.0.1"


def upnp(device: Device, control: str = f"http://{HERE}:5000/ctl") -> Upnp:
    return Upnp(lambda: HERE, lambda gateway: f"http://{gateway}:5000/root.xml", lambda location: (device, control))


def test_upnp_maps_for_everybody_and_takes_back() -> None:
    device = Device()
    way = upnp(device)
    mapped = way.map(PORT, PORT, 600)
    assert mapped == Mapping("UPnP", PORT, PORT, "25.0.0.1", 600)
    assert device.added == [(PORT, "TCP", Device.lanaddr, PORT, "skipstone", "", 600)]
    assert isinstance(mapped, Mapping)
    assert way.unmap(mapped) is None
    assert device.deleted == [(PORT, "TCP")]


def test_upnp_takes_another_port_or_a_mapping_without_end_when_it_has_to() -> None:
    taken = Device("ConflictInMappingEntry")
    mapped = upnp(taken).map(PORT, PORT, 600)
    assert isinstance(mapped, Mapping)
    assert mapped.external_port != PORT
    for_ever = Device("OnlyPermanentLeasesSupported")
    mapped = upnp(for_ever).map(PORT, PORT, 600)
    assert isinstance(mapped, Mapping)
    assert mapped.lease_s == float("inf")
    assert for_ever.added[-1][-1] == 0


def test_upnp_gives_up_with_the_routers_reason() -> None:
    refused = upnp(Device("Action Not Authorized")).map(PORT, PORT, 600)
    assert refused == NotMapped("the router said no: Action Not Authorized")
    crowded = Device(*["ConflictInMappingEntry"] * 9)
    assert isinstance(upnp(crowded).map(PORT, PORT, 600), NotMapped)
    assert len(crowded.added) == 3


def test_upnp_speaks_to_the_gateway_alone() -> None:
    device = Device()
    elsewhere = upnp(device, "http://10.0.0.66:5000/ctl").map(PORT, PORT, 600)
    assert isinstance(elsewhere, NotMapped)
    assert "elsewhere" in elsewhere.reason
    assert device.added == []
    assert not leads_to(HERE, f"http://{HERE}.evil.example/")
    assert not leads_to(HERE, f"https://{HERE}/")
    assert not leads_to(HERE, f"http://{HERE}@10.0.0.66/")
    assert location_in(b"HTTP/1.1 200 OK\r\nLOCATION: http://10.0.0.66/x\r\n\r\n", HERE) is None
    assert location_in(b"\xff\xfe", HERE) is None


def test_without_miniupnpc_or_a_gateway_there_is_a_reason() -> None:
    def missing(location: str) -> tuple[Any, str]:
        raise ImportError

    unable = Upnp(lambda: HERE, lambda gateway: "http://x/", missing).map(PORT, PORT, 600)
    assert isinstance(unable, NotMapped)
    assert "skipstone[nat]" in unable.reason
    assert isinstance(Upnp(lambda: None).map(PORT, PORT, 600), NotMapped)
    assert isinstance(Upnp(lambda: HERE, lambda gateway: None).map(PORT, PORT, 600), NotMapped)


def test_the_search_takes_the_gateways_own_description(monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"http://{HERE}:5000/root.xml"
    with gateway(lambda request: f"HTTP/1.1 200 OK\r\nLocation: {there}\r\n\r\n".encode()) as port:
        assert description_of(HERE, [(HERE, port)]) == there
        monkeypatch.setattr("node.reachability.port_mapping.SEARCH_S", 0.1)
        assert description_of("127.0.0.9", [(HERE, port)]) is None, "somebody else answers"


def test_the_gateway_is_that_of_the_default_route_with_the_lowest_metric(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
        "eth0\t00000000\tFE01A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth0\t0001A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert default_gateway(routes) == "192.168.1.254"
    routes.write_text("Iface\tDestination\n")
    assert default_gateway(routes) is None
    assert default_gateway(tmp_path / "nothing") is None
