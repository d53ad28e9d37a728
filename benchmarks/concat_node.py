"""A node that packs by concatenation with a document mask: `python -m benchmarks.concat_node join ...`, the rest as
`skipstone` has it.

It stands alone because it is a process of its own, an arm of `benchmarks.workload_swarm`.
"""

from __future__ import annotations

from node.__main__ import main
from node.data import feed as feed
from node.data.documents import Place
from node.data.packing import Cursor, DocumentPacker, _Block, _Stretch
from swarm.workload.packing import Piece


class ConcatPacker(DocumentPacker):
    """Cuts the stream of documents wherever a microbatch is full, and one document as long as may be, and masks between
    what is left of them."""

    def _packed(self, stretches: list[_Stretch], end: Place) -> _Block:
        turns, turn, room = list[tuple[Piece, ...]](), list[Piece](), self._room.tokens
        for index, stretch in enumerate(stretches):
            start = 0
            while start < stretch.labels.size:
                stop = min(start + min(room, self._room.sequence), stretch.labels.size)
                turn.append(Piece(index, start, stop))
                room, start = room - (stop - start), stop
                if not room:
                    turns.append(tuple(turn))
                    turn, room = [], self._room.tokens
        if turn:
            turns.append(tuple(turn))
        return _Block(stretches, turns, Cursor(end))


if __name__ == "__main__":
    feed.DocumentPacker = ConcatPacker  # type: ignore[misc]
    main()
