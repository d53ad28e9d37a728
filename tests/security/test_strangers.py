"""A flood of idle connections to a node's DHT, which any host can make."""

import asyncio
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from protocol.identity.keys import Identity
from tests.protocol.dht.running import MODULE, Marked, announced, directory, needs_proc, publish
from tests.protocol.identity.minting import extension_for, new_key


def libp2p_context() -> ssl.SSLContext:
    """A new identity's, by the specification (https://github.com/libp2p/specs/blob/master/tls/tls.md)."""
    key, now = new_key(), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.SERIAL_NUMBER, str(x509.random_serial_number()))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
    certificate = builder.add_extension(extension_for(Identity.generate(), key), critical=False).sign(key, SHA256())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    with tempfile.TemporaryDirectory() as folder:
        pem = Path(folder) / "pem"
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        pem.write_bytes(private + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(pem)
    return context


async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: bytes) -> None:
    """multistream-select: the other side says both lines back, or the protocol is not spoken."""
    for line in (b"/multistream/1.0.0\n", protocol + b"\n"):
        writer.write(bytes([len(line)]) + line)
        await writer.drain()
        echoed = await reader.readexactly((await reader.readexactly(1))[0])
        if echoed != line:
            raise ConnectionError(f"{protocol!r} was answered with {echoed!r}")


async def idle_connection(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One that is whole, and then says nothing. Ends when its reader does."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await agree(reader, writer, b"/tls/1.0.0")
    await writer.start_tls(libp2p_context())
    await agree(reader, writer, b"/yamux/1.0.0")
    return reader, writer


pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

STRANGERS = 300


def open_files(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@needs_proc
@pytest.mark.long  # p2pd leaves each connection 20 s
async def test_idle_connections_do_not_keep_honest_nodes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Marked(monkeypatch)
    own, other = Identity.generate(), Identity.generate()
    async with directory(own) as one, directory(other, one) as two:
        daemon = marked.network_daemon_of(one.process_id)
        assert {"-connManager=1", "-connLo=160", "-connHi=256", "-connGrace=20s"} <= set(
            marked.processes()[daemon].split()
        )
        before = open_files(daemon)
        strangers = [await idle_connection(one.port) for _ in range(STRANGERS)]
        assert open_files(daemon) >= before + STRANGERS - 1
        ours = announced(other)
        await publish(two, ours)
        assert await one.look_up([MODULE]) == [ours]
        async with asyncio.timeout(90):
            while open_files(daemon) >= STRANGERS:
                await asyncio.sleep(0.2)
        again = announced(other, sequence=ours.sequence + 1)
        await publish(two, again)
        assert await one.look_up([MODULE]) == [again]
        for _, writer in strangers:
            writer.transport.abort()
