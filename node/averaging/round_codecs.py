"""What the manifest allows in rounds, with the sizes that the codecs have."""

from __future__ import annotations

from protocol.codecs import encoded_bytes
from swarm.rounds.codecs import RoundCodecs, Rung, ladder
from swarm.vocabulary import Codec

_ELEMENTS = 2**20


def rungs_to(limit: Codec) -> tuple[Rung, ...]:
    """The rungs that a run with this limit has, mildest first."""
    return tuple(rung_of(codecs) for codecs in ladder(limit))


def rung_of(codecs: RoundCodecs) -> Rung:
    """These codecs with what they make of float32."""
    encoded = sum(encoded_bytes(codec, _ELEMENTS) for codec in (codecs.contribution, codecs.result))
    return Rung(codecs, encoded / (2 * 4 * _ELEMENTS))
