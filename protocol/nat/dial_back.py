"""Dial-back: tests whether a peer answers at its port, by TCP and a TLS 1.3 handshake that proves its key."""

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

DIAL_BACK_S: Final = 3.0  # Timeout for connection and handshake together, more than ten round trips to a home
MAX_RESULT_BYTES: Final = 1536


class DialBackOutcome(enum.Enum):
    """Outcome of a dial-back. The values are those in link.proto."""

    REACHED = 1
    CLOSED = 2
    SILENT = 3
    ANOTHER = 4
    NOT_TRIED = 5


@dataclass(frozen=True, slots=True)
class DialBackResult:
    """Answer to a peer that asked for a dial-back: its IP address, the outcome and details."""

    # The asker's IP address as seen by that peer; empty if unknown
    host: Annotated[str, Length(0, 64)]
    outcome: DialBackOutcome
    detail: Detail = ""


_RESULT: Final = converter(DialBackResult, wire.DialBackResult.DESCRIPTOR)


async def dial_back(host: str, port: int, certificate: bytes, timeout_s: float = DIAL_BACK_S) -> DialBackResult:
    """Checks whether the owner of `certificate` (DER) answers at an IP address and port. Raises no network errors."""
    try:  # no host names: their owner could direct the test at other machines
        ipaddress.ip_address(host)
    except ValueError:
        return DialBackResult("", DialBackOutcome.NOT_TRIED, "your link does not show your IP address")
    try:
        async with asyncio.timeout(timeout_s):
            shown = await certificate_at(host, port)
    except TimeoutError:
        return DialBackResult(host, DialBackOutcome.SILENT, f"port {port} did not answer within {timeout_s:g} s")
    except ConnectionRefusedError:
        return DialBackResult(host, DialBackOutcome.CLOSED, f"port {port} refused the connection")
    except (ssl.SSLError, ConnectionError, EOFError) as error:
        detail = f"the server at port {port} is not a node: {type(error).__name__}"
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
    """Decodes a dial-back result. Raises ProtocolViolation if it is malformed, or its host is not an IP address."""
    if len(data) > MAX_RESULT_BYTES:
        raise ProtocolViolation(f"dial-back: {len(data)} bytes are more than {MAX_RESULT_BYTES}")
    said = parsed(wire.DialBackResult, data, f"dial-back: {len(data)} bytes are not a result")
    result: DialBackResult = _RESULT.read(said, None)
    if not result.host and result.outcome is DialBackOutcome.NOT_TRIED:
        return result
    try:
        if "%" in result.host:
            raise ValueError
        return replace(result, host=str(ipaddress.ip_address(result.host)))
    except ValueError:
        raise ProtocolViolation("dial-back: the host is not an IP address") from None


async def certificate_at(host: str, port: int) -> bytes:
    """Connects to a server by TLS 1.3 and returns the certificate (DER) that it proves. Raises OSError."""
    _, writer = await asyncio.open_connection(host, port, ssl=_context())
    try:
        secured: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return secured.getpeercert(binary_form=True) or b""
    finally:
        # Without a TLS shutdown, because the server rejects us meanwhile, and its answer is irrelevant.
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _context() -> ssl.SSLContext:
    """Returns a TLS context that accepts any certificate. The caller compares the certificate with the expected one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # required by gRPC's server
    return context
