"""Small modules are cut into many pieces here, as large ones are in earnest."""

import pytest

from node.averaging.exchange import pieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "SMALLEST_PIECE", 2**14)
    monkeypatch.setattr(pieces, "PIECES_OF_A_SHARD", 8)
