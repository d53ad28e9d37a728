"""Who may begin to speak: the checks before a stream's first frame.

A stream whose caller does not read cannot be ended by us: gRPC's status waits behind what was written, for as long as the
connection lives. So each peer gets few streams, and who is turned away here is told by the status alone, which nothing
can hold up.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import grpc

from protocol.certificates import peer_of_certificate
from protocol.streams import AcceptedStream, ServicerContext
from swarm.errors import ProtocolViolation, Rejected
from swarm.vocabulary import PeerId, RunId

MAX_STREAMS_PER_PEER: Final = 3
"""The link's, its successor's after a restart, and one that has not quite ended."""


class Door:
    """Lets in the peers of a run, and counts the streams of each from their first moment until gRPC has forgotten them."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._streams: Counter[PeerId] = Counter()

    async def enter(self, context: ServicerContext) -> PeerId:
        """The peer that calls, when it may.

        Raises:
            grpc.aio.AbortError: it may not, and has been told; gRPC wants this error back from its handler.
        """
        try:
            peer = proven_peer(AcceptedStream(context).certificate(), self._run)
        except Rejected as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        if self._streams[peer] >= MAX_STREAMS_PER_PEER:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too many streams at once from this peer")
        self._streams[peer] += 1
        context.add_done_callback(lambda _context: self._left(peer))
        return peer

    def _left(self, peer: PeerId) -> None:
        self._streams[peer] -= 1
        if not self._streams[peer]:
            del self._streams[peer]


def proven_peer(certificate: bytes, run: RunId) -> PeerId:
    """The peer whose certificate for the run the caller showed, and whose key it thereby has.

    TLS alone says little: with the authority's key, which is no secret, anybody signs what he likes.

    Raises:
        Rejected: the certificate proves no peer.
    """
    try:
        return peer_of_certificate(certificate, run)
    except ProtocolViolation as error:
        raise Rejected(str(error)) from None
