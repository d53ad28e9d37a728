"""Opening a stream to a peer: address after address, TLS pinned to its certificate, then both Hellos."""

from __future__ import annotations

import asyncio

from protocol.certificates import TlsCredentials
from protocol.frames import Hello, decode, encode
from protocol.handshake import expect_hello, objection_error, objection_to
from protocol.seams import Contact
from protocol.streams import DialledStream, far_end_at, open_channel
from swarm.errors import PeerError, Rejected, Unreachable
from swarm.vocabulary import short


async def dial(
    contact: Contact, credentials: TlsCredentials, own: Hello, timeout_s: float
) -> tuple[DialledStream, Hello]:
    """A stream on which both sides have said Hello, and the peer's.

    Raises:
        Unreachable: no address answered in time; Duplicate when the peer has a stream to us.
        Rejected, StaleVersion: the peer's Farewell or our objection to its Hello.
        ProtocolViolation: it began with something else than a Hello.
    """
    try:
        async with asyncio.timeout(timeout_s):
            stream = await _first_that_answers(contact, credentials, encode(own), timeout_s)
            return await _introduced(stream, contact, own)
    except TimeoutError:
        raise Unreachable(
            f"{short(contact.peer)} did not answer at {', '.join(contact.addresses)} within {timeout_s:g} s"
        ) from None


async def _first_that_answers(
    contact: Contact, credentials: TlsCredentials, hello: bytes, timeout_s: float
) -> DialledStream:
    """A connected stream with our Hello on it. The last address's error counts: earlier ones are more direct, not truer."""
    error: PeerError = Unreachable(f"no address is known of {short(contact.peer)}")
    for address in contact.addresses:
        try:
            channel = open_channel(contact, address, credentials)
            stream = DialledStream(channel, far_end_at(address, contact.certificate))
        except Unreachable as unusable:
            error = unusable
            continue
        try:
            async with asyncio.timeout(timeout_s / len(contact.addresses)):
                await stream.write(hello)
                return stream
        except (Unreachable, Rejected) as failed:
            await stream.close()
            error = type(failed)(f"{short(contact.peer)} at {address}: {failed}")
        except TimeoutError:
            await stream.close()
            error = Unreachable(f"{short(contact.peer)} at {address}: no answer")
        except BaseException:
            await stream.close()
            raise
    raise error


async def _introduced(stream: DialledStream, contact: Contact, own: Hello) -> tuple[DialledStream, Hello]:
    try:
        first = await stream.read()
        if first is None:
            raise Unreachable(f"{short(contact.peer)} ended the stream without a word")
        hello = expect_hello(decode(first), contact.peer)
        objection = objection_to(hello, own.run, contact.peer)
        if objection is not None:
            await stream.write(encode(objection))
            raise objection_error(objection, contact.peer)
    except BaseException:
        await stream.close()
        raise
    return stream, hello
