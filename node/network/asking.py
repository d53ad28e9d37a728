"""Questions to strangers: several at once, because one that never answers must not keep the others from doing so; and
their answers are only data.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from node.concurrency.task_groups import task_scope
from node.observability.status import Status
from node.observability.typed_json import from_json
from swarm.vocabulary.errors import ManifestError, PeerError, ProtocolViolation
from swarm.vocabulary.types import PeerId, short

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Answered(Generic[Answer]):
    """A good answer, and who gave it."""

    answer: Answer


async def first_good(peers: Sequence[PeerId], ask: Callable[[PeerId], Awaitable[Answer]]) -> Answered[Answer] | str:
    """Asks all of them at once. Returns the first good answer, or, when there is none, why the last one gave none.

    Args:
        ask: raises PeerError or ManifestError for an answer that is none, or not good.
    """

    async def attempt(peer: PeerId) -> Answered[Answer] | str:
        try:
            return Answered(await ask(peer))
        except (PeerError, ManifestError) as error:
            return f"{short(peer)}: {error}"

    why = "nobody was asked"
    async with task_scope() as tasks:
        waiting = {tasks.create_task(attempt(peer)) for peer in peers}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                result = task.result()
                if isinstance(result, Answered):
                    for other in waiting:
                        other.cancel()
                    return result
                why = result
    return why


def parse_answer(text: bytes) -> dict[str, Any]:
    """Parses a peer's answer to a question whose answer is JSON. Raises ProtocolViolation when it is not a JSON
    object.
    """
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolViolation("the answer is not JSON") from None
    if not isinstance(table, dict):
        raise ProtocolViolation("the answer is not a JSON object")
    return table


def parse_status(text: bytes) -> Status:
    """Parses a peer's answer to a question for its status: what is malformed in it has its default, and what this
    version does not know is left out. Raises ProtocolViolation when it is not a JSON object.
    """
    return from_json(Status, parse_answer(text), "status", lenient=True)
