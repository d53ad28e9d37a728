"""Dialling back: the test whether a peer answers at its port, by TCP and a TLS 1.3 handshake that proves its key."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import ssl
from dataclasses import dataclass, replace
from typing import Annotated, Final

from protocol.frames.codec import converter, parsed
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.bounds import Detail, Length
from swarm.vocabulary.errors import ProtocolViolation

# For the connection and the handshake together: a home's round trip is less than a tenth of that
DIAL_BACK_S: Final = 3.0
MAX_RESULT_BYTES: Final = 1536
MAX_HOST_CHARACTERS: Final = 64


class DialBackOutcome(enum.Enum):
    """The outcome of a dial-back. The value is link.proto's."""

    REACHED = 1
    CLOSED = 2
    SILENT = 3
    ANOTHER = 4
    NOT_TRIED = 5


@dataclass(frozen=True, slots=True)
class DialBackResult:
    """The result that one peer reports."""

    # The IP address that it has for the asker; empty when it knows none
    host: Annotated[str, Length(0, MAX_HOST_CHARACTERS)]
    outcome: DialBackOutcome
    detail: Detail = ""


_RESULT: Final = converter(DialBackResult, wire.DialBackResult.DESCRIPTOR)


async def dial_back(host: str, port: int, certificate: bytes, timeout_s: float = DIAL_BACK_S) -> DialBackResult:
    """Checks whether the owner of `certificate` (DER) answers at an IP address and port. No network errors."""
    # A name is not looked up: its owner could point it at somebody else.
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return DialBackResult("", DialBackOutcome.NOT_TRIED, "your link does not show an IP address of yours")
    try:
        async with asyncio.timeout(timeout_s):
            shown = await _certificate_at(host, port)
    except TimeoutError:
        return DialBackResult(host, DialBackOutcome.SILENT, f"port {port} did not answer within {timeout_s:g} s")
    except ConnectionRefusedError:
        return DialBackResult(host, DialBackOutcome.CLOSED, f"port {port} refused the connection")
    except (ssl.SSLError, ConnectionError, EOFError) as error:
        detail = f"what answers at port {port} does not speak as a node does: {type(error).__name__}"
        return DialBackResult(host, DialBackOutcome.ANOTHER, detail)
    except OSError as error:
        return DialBackResult(host, DialBackOutcome.SILENT, f"port {port}: {error.strerror or type(error).__name__}")
    if shown != certificate:
        return DialBackResult(host, DialBackOutcome.ANOTHER, f"another peer or program answers at port {port}")
    return DialBackResult(host, DialBackOutcome.REACHED)


def encode_dial_back(result: DialBackResult) -> bytes:
    data: bytes = wire.DialBackResult(**_RESULT.write(result, None)).SerializeToString()
    return data


def decode_dial_back(data: bytes) -> DialBackResult:
    """Decodes a peer's answer. Raises ProtocolViolation: it is none, or its host is no IP address."""
    if len(data) > MAX_RESULT_BYTES:
        raise ProtocolViolation(f"dial-back: {len(data)} bytes are more than {MAX_RESULT_BYTES}")
    said = parsed(wire.DialBackResult, data, f"dial-back: {len(data)} bytes are no result")
    result: DialBackResult = _RESULT.read(said, None)
    return replace(result, host=_read_host(result.host, result.outcome))


def _read_host(host: str, outcome: DialBackOutcome) -> str:
    if not host and outcome is DialBackOutcome.NOT_TRIED:
        return ""
    try:
        if "%" in host:
            raise ValueError
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise ProtocolViolation("dial-back: the host is not an IP address") from None


async def _certificate_at(host: str, port: int) -> bytes:
    """The server's certificate (DER), whose key TLS 1.3 proves. Raises OSError."""
    _, writer = await asyncio.open_connection(host, port, ssl=_context())
    try:
        secured: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return secured.getpeercert(binary_form=True) or b""
    finally:
        # No farewell of TLS: the server is turning us away meanwhile, and what it says to that is of no interest.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _context() -> ssl.SSLContext:
    """Takes any certificate: it is compared afterwards, which is stricter than any chain."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # gRPC's server hangs up on who does not offer it
    return context
