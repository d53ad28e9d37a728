"""Length-prefixed messages between a node and its DHT child (`proto/dht_process.proto`).

It stands alone because node and child speak by it, and neither imports the other.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from swarm.vocabulary.errors import ProtocolViolation, ResourceExhausted

MAX_MESSAGE_BYTES = 16 * 2**20
KEYS_PER_FIND = 16
"""So that the answer fits even when every key is full: 16 x 256 records x 2 KiB are 8 MiB."""
_LENGTH_BYTES = 4

Received = TypeVar("Received", bound=Message)


def pack(message: Message) -> bytes:
    """The message with its length before it.

    Raises:
        ResourceExhausted: longer than MAX_MESSAGE_BYTES.
    """
    data: bytes = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ResourceExhausted(f"dht: a message of {len(data)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def receive(reader: asyncio.StreamReader, into: type[Received]) -> Received | None:
    """The next message, or None when the other side has closed the pipe, also in the middle of a message.

    Raises:
        ProtocolViolation: too long, or not such a message. Nothing more can be read after that.
    """
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolViolation(f"dht: a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
        data = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    message: Received = into()
    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError, ValueError):
        raise ProtocolViolation("dht: bytes on the pipe are no message") from None
    return message
