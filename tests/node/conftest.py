"""Settings of the node's tests."""

import pytest

from node.data import packing

BLOCK_TOKENS = 2**12


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of tests are short: for a block as long as in earnest they are read hundreds of times."""
    monkeypatch.setattr(packing, "BLOCK_TOKENS", BLOCK_TOKENS)
    monkeypatch.setitem(packing.RowPacker.__init__.__kwdefaults__, "block_tokens", BLOCK_TOKENS)


@pytest.fixture(autouse=True)
def _blocks_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """New blocks are the identity, which would hide what they do."""
    monkeypatch.setattr("node.model.initialization.writes", lambda name: False)
