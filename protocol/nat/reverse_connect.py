"""The caller's side of calls: a linked peer passes the call on, and the called peer dials us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from protocol.interfaces.clock import Clock
from protocol.interfaces.directory import AddressBook, Contact
from protocol.interfaces.transport import Ask, Question, QuestionAbout
from swarm.vocabulary.errors import PeerError, Unreachable
from swarm.vocabulary.types import PeerId, short


class Calls:
    """`Caller` through the peers that the contact names, in turn. `own_record` tells the called peer where to dial."""

    def __init__(
        self, book: AddressBook, clock: Clock, own_record: Callable[[], bytes], can_be_dialled: Callable[[], bool]
    ) -> None:
        self._book = book
        self._clock = clock
        self._own_record = own_record
        self._can_be_dialled = can_be_dialled

    def can_be_dialled(self) -> bool:
        return self._can_be_dialled()

    async def call(self, contact: Contact, ask: Ask, patience_s: float) -> None:
        """Calls the peer. Each passing peer but the last gets half of the remaining time. Raises Unreachable."""
        question = Question(QuestionAbout.CALL, peer=contact.peer, record=self._own_record())
        deadline = self._clock.monotonic() + patience_s
        through = self._who_can_pass_it_on(contact)
        said = "none of those who could tell it is known"
        for place, peer in enumerate(through):
            left_s = max(0.0, deadline - self._clock.monotonic())
            share_s = left_s if place == len(through) - 1 else left_s / 2
            try:
                # The limit of `ask` does not include a link that has to be opened first.
                async with asyncio.timeout(share_s):
                    await ask(peer, question, share_s)
                    return
            except TimeoutError:
                said = f"{short(peer)} did not answer within {share_s:.1f} s"
            except PeerError as error:
                said = str(error)
        raise Unreachable(f"{short(contact.peer)} cannot be dialled, and calling it was in vain: {said}")

    def _who_can_pass_it_on(self, contact: Contact) -> list[PeerId]:
        """Only who can be dialled: nobody is called in order to be asked to call."""
        known = [self._book.contact(peer) for peer in contact.via]
        return [through.peer for through in known if through is not None and through.addresses]
