"""The one message of a round that says something for its parts: a roster names the round and the anchor of all its
entries. Every other is as `protocol.frames.codec` derives it."""

from __future__ import annotations

from typing import Any, Final

from protocol.frames.codec import Around, Converter, converter
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.averaging_messages import RoundId, SignedRoster
from swarm.vocabulary.types import AnchorVersion

_ROUND: Final = converter(RoundId, wire.RoundId.DESCRIPTOR)
_VERSION: Final = converter(AnchorVersion, wire.AnchorVersion.DESCRIPTOR)
_ROSTER: Final = converter(SignedRoster, wire.Roster.DESCRIPTOR)


def _read_roster(said: wire.Roster, _: Around) -> Any:
    return _ROSTER.read(said, {"round": _ROUND.read(said.round, None), "base": _VERSION.read(said.base, None)})


CONVERTERS: Final[dict[type, Converter]] = {SignedRoster: Converter(_ROSTER.write, _read_roster)}
"""By class."""
