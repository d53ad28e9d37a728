"""A peer in a process of its own, to be killed or stopped: `python -m tests.protocol.transport.peer_process CONTACT
[ROWS]`.

CONTACT is the JSON of the parent's contact. Prints its own as one line; then sends the parent a tensor of ROWS x 4 KiB
if told to, and otherwise takes what comes until it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys

from protocol.interfaces.tensor_spec import DType, TensorSpec
from protocol.interfaces.transport import Contact
from swarm.vocabulary.types import PeerId
from tests.protocol.transport.link_peers import Persona, forward, node, with_settings


def contact_to_json(contact: Contact) -> str:
    return json.dumps([contact.peer, contact.addresses, contact.certificate.hex()])


def contact_from_json(text: str) -> Contact:
    peer, addresses, certificate = json.loads(text)
    return Contact(PeerId(peer), tuple(addresses), bytes.fromhex(certificate))


async def main(parent: Contact, rows: int) -> None:
    persona = Persona()
    persona.book.contacts[parent.peer] = parent
    async with node(persona, settings=with_settings(chunk_bytes=4096)) as own:
        print(contact_to_json(persona.contact(own.port)), flush=True)
        if rows:
            await own.handler.until(lambda: own.handler.ups)
            spec = TensorSpec((rows, 1024), DType.FLOAT32)
            data = memoryview(bytearray(spec.byte_length))
            await own.transport.send(parent.peer, forward(own.peer, parent.peer), spec, data)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(contact_from_json(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
