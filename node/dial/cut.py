"""The cut of a model into as few stages as the cards allow, or one for each peer.

Every further stage costs two more hidden states a token on a link. More peers than stages become replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from node.model.memory_need import blocks_that_fit, need_of
from protocol.manifest.manifest import Manifest
from swarm.membership.room import Room, size_text
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import MAX_STAGES, ModuleId, Reasoned

FILLED: Final = 0.75
"""Share of a card that a stage's need may fill: the rest is for kept graphs, the driver, the desktop and fragments."""
COMMON_CARD: Final = 12 * 10**9
"""Bytes of a card where nobody says another: many gaming PCs have one."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers of a run: bytes of each one's card and their number, if known."""

    card: int | None = None
    number: int | None = None


def spread(blocks: int, stages: int) -> tuple[int, ...]:
    """The blocks of each of at most so many stages, evenly; stage 0 has none."""
    others = max(1, min(stages - 1, blocks))
    return (0, *(blocks * (number + 1) // others - blocks * number // others for number in range(others)))


def choose_blocks(uncut: Manifest, peers: Peers) -> Reasoned[tuple[int, ...]]:
    """Cuts a model that has all blocks in stage 1. Raises ConfigError if card or peers are too few or too small."""
    blocks = uncut.stages.blocks[1]
    if peers.number is not None and peers.number < 2:
        raise ConfigError("a run needs two peers at least", hint="Give --peers 2 or more; for one there is `solo`.")
    if peers.number is not None and peers.card is None:
        cut = spread(blocks, min(peers.number, MAX_STAGES))
        if len(cut) < peers.number:
            return Reasoned(cut, f"one block each is the least: {peers.number - len(cut)} of the peers are replicas")
        return Reasoned(cut, f"one for each of {peers.number} peers, the first with embedding and head")
    card = COMMON_CARD if peers.card is None else peers.card
    most = _most_blocks(uncut, card)
    stages = 1 + -(-blocks // most)
    if stages > MAX_STAGES:
        raise ConfigError(f"that takes {stages} stages; a run has {MAX_STAGES} at most", hint="Say a larger --card.")
    if peers.number is not None and peers.number < stages:
        raise ConfigError(
            f"a card of {_card(card)} holds {most} of {blocks} blocks, so this model takes {stages} peers, "
            f"not {peers.number}",
            hint="Say a larger --card, more --peers or a smaller --size.",
        )
    said = "of " if peers.card is not None else "(taken, as --card says none) of "
    reason = f"the fewest for cards {said}{_card(card)}, {FILLED:.0%} of which holds {_number(most, 'block')}"
    if peers.number is not None and peers.number > stages:
        reason += f"; {_number(peers.number - stages, 'peer')} more are replicas"
    return Reasoned(spread(blocks, stages), reason)


def _most_blocks(uncut: Manifest, card: int) -> int:
    room = Room(Reasoned(None, ""), Reasoned(int(FILLED * card), f"of a card of {_card(card)}"))
    ends = need_of(uncut, (ModuleId(0),), DEFAULT_SLOTS)
    if room.lacks(ends) is not None:
        raise ConfigError(
            f"stage 0, with a vocabulary of {uncut.model.vocabulary:,}, takes {size_text(ends.device)}, more than "
            f"{FILLED:.0%} of a card of {_card(card)}",
            hint="Say a larger --card or a smaller --size, or take a tokenizer with fewer tokens.",
        )
    most = blocks_that_fit(uncut, room, DEFAULT_SLOTS)
    if most == 0:
        raise ConfigError(
            f"one block of this model takes more than {FILLED:.0%} of a card of {_card(card)}",
            hint="Say a larger --card or a smaller --size.",
        )
    return most


def _card(size_bytes: int) -> str:
    return f"{size_bytes / 10**9:g} GB"


def _number(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
