"""gRPC layer of a link: one method, `Connect`, with streams in both directions. Maps grpc.aio's errors to ours."""

import asyncio
import contextlib
import ipaddress
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import grpc

from protocol.frames.codec import printable
from protocol.frames.frames import MAX_CHUNK_FRAME_BYTES
from protocol.identity.certificates import TlsCredentials, pem_of
from protocol.interfaces.transport import Contact, FarEnd
from protocol.transport.settings import host_of
from swarm.vocabulary.errors import PeerError, ProtocolViolation, Rejected, Unreachable

SERVICE: Final = "skipstone.Skipstone"
METHOD: Final = "Connect"

_COMMON_OPTIONS: Final = (
    # Unread bytes per sender. With gRPC's BDP probing this would grow with the link's speed.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 * 1024 * 1024),
    ("grpc.http2.write_buffer_size", 1024 * 1024),  # preparing the next chunk overlaps with sending the last one
    ("grpc.max_metadata_size", 8192),
    # No compression: tensors have codecs, and decompression bombs are impossible.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)
_SERVER_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    # A second process on the same port must fail, not share it.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 30_000),
)
_CHANNEL_OPTIONS: Final = (
    *_COMMON_OPTIONS,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config_disable_resolution", 1),
    # By default gRPC shares connections, with their backoff, between channels. Here each channel is one attempt.
    ("grpc.use_local_subchannel_pool", 1),
)

_ADDRESS: Final = re.compile(
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})"
)
_WRONG_CERTIFICATE: Final = re.compile("CERTIFICATE_VERIFY_FAILED|Hostname Verification")
# A TLS 1.3 server rejects a client's certificate only after the client's handshake is complete
_HUNG_UP: Final = re.compile("failed to connect.*(closed|reset|pipe)", re.IGNORECASE | re.DOTALL)


ServicerContext: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Serve = Callable[[object, ServicerContext], Awaitable[None]]


@contextlib.contextmanager
def _mapped_errors() -> Iterator[None]:
    """Converts errors of grpc.aio within the block to PeerError."""
    try:
        yield
    except asyncio.CancelledError:  # ours, or grpc.aio's for a cancelled call
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise Unreachable("the stream was closed") from None
    except (grpc.aio.BaseError, grpc.RpcError, asyncio.InvalidStateError) as error:
        raise stream_error(error) from None


class Stream:
    """One side of a gRPC call: a bidirectional stream of frames, in order. One reader and one writer at a time."""

    def __init__(self, side: Any) -> None:
        self._side = side

    async def read(self) -> bytes | None:
        """Reads the next frame; None if the other side ended the stream. Raises PeerError if the stream broke."""
        with _mapped_errors():
            frame = await self._side.read()
        return None if frame is grpc.aio.EOF else frame

    async def write(self, frame: bytes) -> None:
        """Writes a frame, waiting while the other side does not read. Raises PeerError."""
        with _mapped_errors():
            await self._side.write(frame)

    async def half_close(self) -> None:
        """Ends our side. A gRPC server does so by the status that follows when the handler of `Connect` returns."""

    async def close(self) -> None:
        """Frees the stream. On a server gRPC does so when the handler returns."""


class DialledStream(Stream):
    """A stream that this side opened, on a gRPC channel that carries no other stream."""

    def __init__(self, channel: grpc.aio.Channel, far_end: FarEnd | None = None) -> None:
        super().__init__(channel.stream_stream(f"/{SERVICE}/{METHOD}")())
        self._channel, self._far_end = channel, far_end

    def far_end(self) -> FarEnd | None:
        """Returns the peer's host and certificate as dialled; None if the dialler has not set them."""
        return self._far_end

    async def half_close(self) -> None:
        with _mapped_errors():
            await self._side.done_writing()

    async def close(self) -> None:
        self._side.cancel()
        await self._channel.close()


class AcceptedStream(Stream):
    """A stream that the other side opened. gRPC ends it when the handler of `Connect` returns."""

    def far_end(self) -> FarEnd:
        """Returns the caller's host, empty if unknown, and certificate. Raises Rejected if the caller showed none."""
        return FarEnd(_host_of_caller(self._side.peer()), self.certificate())

    def certificate(self) -> bytes:
        """Returns the DER of the caller's certificate, proven by TLS. Raises Rejected if the caller showed none."""
        pem = self._side.auth_context().get("x509_pem_cert")
        if not pem:
            raise Rejected("the caller showed no certificate")
        return ssl.PEM_cert_to_DER_cert(pem[0].decode())


def _host_of_caller(name: str) -> str:
    """Extracts the IP address from gRPC's caller name, such as `ipv6:%5B2001:db8::1%5D:4002`; else returns ""."""
    kind, _, address = unquote(name).partition(":")
    host = host_of(address).partition("%")[0]
    try:
        found = ipaddress.ip_address(host) if kind in ("ipv4", "ipv6") else None
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    return "" if found is None else str(found)


def _limits(max_frame_bytes: int) -> tuple[tuple[str, int], ...]:
    return (("grpc.max_receive_message_length", max_frame_bytes), ("grpc.max_send_message_length", max_frame_bytes))


def open_channel(
    contact: Contact, address: str, credentials: TlsCredentials, *, max_frame_bytes: int = MAX_CHUNK_FRAME_BYTES
) -> grpc.aio.Channel:
    """Opens a channel that trusts only the contact's certificate and presents ours. Raises Unreachable."""
    return grpc.aio.secure_channel(
        target_of(address),
        grpc.ssl_channel_credentials(
            root_certificates=pem_of(contact.certificate),
            private_key=credentials.private_key_pem,
            certificate_chain=credentials.certificate_pem,
        ),
        options=(*_CHANNEL_OPTIONS, *_limits(max_frame_bytes), ("grpc.ssl_target_name_override", contact.peer)),
    )


def target_of(address: str) -> str:
    """Returns the gRPC target of a peer's `host:port`, never of other schemes (unix:, xds:). Raises Unreachable."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise Unreachable(f"{address[:80]!r} is not an address of the form host:port")
    return f"dns:///{address}"


def make_server(
    serve: Serve,
    credentials: TlsCredentials,
    address: str,
    max_streams: int,
    *,
    max_frame_bytes: int = MAX_CHUNK_FRAME_BYTES,
) -> tuple[grpc.aio.Server, int]:
    """Makes a gRPC server that accepts only the run's certificates. Returns it with its port. Raises RuntimeError."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_logging)
    server = grpc.aio.server(options=(*_SERVER_OPTIONS, *_limits(max_frame_bytes)), maximum_concurrent_rpcs=max_streams)
    methods = {METHOD: grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    secured = grpc.ssl_server_credentials(
        [(credentials.private_key_pem, credentials.certificate_pem)],
        root_certificates=credentials.authority_pem,
        require_client_auth=True,
    )
    return server, server.add_secure_port(address, secured)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether to keep a log record of gRPC: not for a cut stream, with which any caller could fill the log."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


def stream_error(error: BaseException) -> PeerError:
    """Converts an error of grpc.aio to the PeerError that this package raises."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return Unreachable("the stream broke")
    details = printable((error.details() or "no details")[:300])
    match error.code():
        case grpc.StatusCode.UNIMPLEMENTED:
            return Rejected("the server at that address is not a Skipstone node")
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Rejected(f"the peer refused the connection: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            return ProtocolViolation(f"a frame was too long: {details}")
        case grpc.StatusCode.UNAVAILABLE if _WRONG_CERTIFICATE.search(details):
            return Rejected(f"another peer answers at that address: {details}")
        case grpc.StatusCode.UNAVAILABLE if _HUNG_UP.search(details):
            return Unreachable(f"the peer closed the connection; it may train another run: {details}")
        case _:
            return Unreachable(f"the stream broke: {details}")
