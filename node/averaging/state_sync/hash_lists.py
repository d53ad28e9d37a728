"""Requests for the hash list of a state: to several donors at once, and the first one that the digest proves
will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from node.averaging.anchor.anchor import version_of
from node.averaging.anchor.layout import Layout
from node.concurrency.task_groups import task_scope
from protocol.frames.rpc import HashList, decode_hash_list
from protocol.interfaces.transport import Question, QuestionAbout, Transport
from swarm.vocabulary.errors import NoQuorum, PeerError, ProtocolViolation, SkipstoneError, Stalled, Unreachable
from swarm.vocabulary.types import AnchorVersion, ModuleId, PeerId, short

ANSWER_S: Final = 10.0
MOST_ASKED: Final = 16


@dataclass(frozen=True, slots=True)
class ProvenList:
    """A hash list that the digest has proved, and the donors asked for it."""

    hash_list: HashList
    donors: tuple[PeerId, ...]
    """Those asked, without the ones known not to have the state."""


async def first_hash_list(
    transport: Transport,
    module: ModuleId,
    layout: Layout,
    wanted: AnchorVersion,
    donors: Sequence[PeerId],
    on_liar: Callable[[PeerId, str], None],
) -> ProvenList:
    """Fetches the hash list of `wanted`'s digest. At most the first `MOST_ASKED` of `donors` are asked.

    Raises:
        NoQuorum: none of the donors has the state.
        Stalled: some could not be reached or did not answer, and of the others none has it.
    """
    question = Question(QuestionAbout.STATE, module=module, digest=wanted.digest)
    asked = tuple(dict.fromkeys(donors))[:MOST_ASKED]
    failed: dict[PeerId, PeerError] = {}
    found: asyncio.Queue[HashList | None] = asyncio.Queue()

    async def ask(donor: PeerId) -> None:
        try:
            found.put_nowait(_proven(await transport.ask(donor, question, ANSWER_S), layout, wanted))
        except PeerError as error:
            failed[donor] = error
            if isinstance(error, ProtocolViolation):
                on_liar(donor, str(error))
            found.put_nowait(None)

    async with task_scope() as tasks:
        running = [tasks.create_task(ask(donor)) for donor in asked]
        for _ in running:
            hash_list = await found.get()
            if hash_list is not None:
                for task in running:
                    task.cancel()
                return ProvenList(hash_list, tuple(donor for donor in asked if donor not in failed))
    raise _nobody_has(wanted, failed)


def _proven(data: bytes, layout: Layout, wanted: AnchorVersion) -> HashList:
    """Raises ProtocolViolation when it is not the list that the digest stands for, or of another module."""
    said = decode_hash_list(data, digest=wanted.digest, elements=layout.elements, chunk_elements=layout.chunk_elements)
    version = said.version
    if version_of(layout, said.hashes, version.round, version.steps, version.tokens, version.fragment) != version:
        raise ProtocolViolation(f"this is not the hash list of state {wanted.digest.hex()[:12]}")
    return said


def _nobody_has(wanted: AnchorVersion, failed: dict[PeerId, PeerError]) -> SkipstoneError:
    told = "; ".join(f"{short(donor)}: {error}" for donor, error in failed.items()) or "there are no donors"
    if any(isinstance(error, Unreachable | Stalled) for error in failed.values()):
        return Stalled(
            f"nobody has answered for the state of round {wanted.round}: {told}",
            hint="Check this machine's connection to the peers named above; it is tried again.",
        )
    return NoQuorum(
        f"no peer has the state of round {wanted.round}: {told}",
        hint="It is tried again with the newest state that the module's replicas announce.",
    )
