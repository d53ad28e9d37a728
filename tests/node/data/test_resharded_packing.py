"""Where the router goes on learning, each block is packed by one router, its place says which, and documents are drawn
to be scored."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from node.data.document_packer import DocumentPacker, reading_place
from node.data.documents import Documents
from node.data.labels import UNSCORED
from node.data.packing import Cursor, Microbatch
from node.data.sampling import Sampler
from node.data.tokenizers import ByteTokenizer
from node.experts.block_routers import BlockRouters
from node.experts.router import Router
from protocol.manifest.manifest import FEWEST_SCORED
from swarm.experts.routes import best_route
from swarm.vocabulary.errors import CorruptSnapshot, StateError
from tests.node.data.test_documents import Texts, everything
from tests.node.experts.routed import PREFIX, manifest_with, some_router
from tests.node.experts.test_route_tables import resharding

FIRST, SECOND, THIRD = (some_router((1, 2, 2), seed=seed) for seed in range(3))
MANIFEST = resharding(manifest_with(FIRST, data__held_out=0.0))
BLOCK = 300


def texts() -> Documents:
    random = np.random.default_rng(1)
    contents = {
        f"{number:02}": bytes(random.integers(97, 123, 20 + 3 * number).astype(np.uint8)) for number in range(30)
    }
    return Documents(Texts(contents), ByteTokenizer(), seed=9, router=FIRST)


class Packed:
    """A packer whose router is another one whenever somebody says so."""

    def __init__(self, start: Cursor = Cursor(), now: Router | None = None) -> None:  # noqa: B008
        self.now = now
        routers = BlockRouters(FIRST, lambda: self.now)
        fragments = texts().endless(reading_place(start.block), everything)
        self.packer = DocumentPacker(MANIFEST, fragments, start, routers=routers, sampler=Sampler(MANIFEST))
        self.packer._block_tokens = BLOCK

    def next(self) -> Microbatch:
        text = self.packer.next()
        assert text is not None
        return text

    def block(self) -> list[Microbatch]:
        """The rest of the current one."""
        found = [self.next()]
        while found[-1].end.taken:
            found.append(self.next())
        return found


def test_another_router_counts_from_the_next_block_on() -> None:
    packed = Packed()
    first = [packed.next()]
    packed.now = SECOND
    first += packed.block()
    second = packed.block()
    for block, router in ((first, FIRST), (second, SECOND)):
        for text in block:
            of = [router.affinity("", sample.opening) for sample in text.samples]
            assert all(best_route(scores) == text.route for scores in of)
    assert any(text.samples for text in first)
    assert any(text.samples for text in second)
    assert {text.start.routed_by for text in first} == {""}
    assert len({text.start.routed_by for text in second}) == 1
    assert second[0].start.routed_by
    assert second[-1].end.routed_by == "", "what the next one is packed by is not known yet"


@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize("router", [None, SECOND])
def test_whoever_goes_on_within_a_block_goes_on_with_its_router(taken: int, router: Router | None) -> None:
    packed = Packed(now=router)
    packed.block()
    for _ in range(taken):
        packed.next()
    packed.next()  # so that the place is one of a text that has been packed
    text = packed.next()
    packed.now = THIRD
    again = Packed(text.start, now=THIRD)
    for expected in [text, *packed.block(), *packed.block()]:
        got = again.next()
        assert got.labels.tolist() == expected.labels.tolist()
        assert (got.route, got.affinity, got.end) == (expected.route, expected.affinity, expected.end)
        assert got.start.routed_by == expected.start.routed_by


def test_no_text_is_lost_or_read_twice_when_the_router_changes() -> None:
    packed, seen = Packed(), Counter[int]()
    for router in (None, SECOND, THIRD, FIRST, None, SECOND, THIRD, None):
        packed.now = router
        for text in packed.block():
            if text.start.block.epoch == 0:
                seen.update(text.labels[0].tolist())
    wanted = Counter[int]()
    for fragment in texts().epoch(Cursor().block, everything):
        wanted.update(fragment.tokens.tolist())
    assert packed.packer.cursor.block.epoch >= 1
    assert {token: count for token, count in seen.items() if count < wanted[token]} == {}


def test_a_share_of_the_documents_is_drawn_and_the_tokens_of_their_routes_are_not_scored() -> None:
    drawn = Counter[bytes]()
    for share in (0.5, 1.0):
        manifest = resharding(MANIFEST, share)
        routers, fragments = BlockRouters(FIRST), texts().epoch(Cursor().block, everything)
        packer = DocumentPacker(manifest, fragments, Cursor(), routers=routers, sampler=Sampler(manifest))
        samples = [(text, sample) for text in iter(packer.next, None) for sample in text.samples]
        for text, sample in samples:
            labels = sample.text.labels[0]
            assert sample.text.size <= manifest.microbatch_tokens
            assert sum(sample.text.documents) == sample.text.size
            assert max(sample.text.documents) <= manifest.model.sequence
            assert (labels[:PREFIX] == UNSCORED).all()
            assert sample.text.scored == labels.numel() - PREFIX >= FEWEST_SCORED
            assert sample.opening.tolist() == sample.text.tokens[0, 1 : PREFIX + 1].tolist()
            assert sample.text.route == text.route
        assert len({sample.opening.tobytes() for _, sample in samples}) == len(samples)
        drawn[str(share).encode()] = len(samples)
    assert 0 < drawn[b"0.5"] < drawn[b"1.0"] <= 30


def test_a_place_that_names_no_router_is_refused() -> None:
    routers = BlockRouters(FIRST)
    with pytest.raises(CorruptSnapshot, match="a router that cannot be read"):
        routers.saved("?")
    with pytest.raises(StateError, match="the router cannot be read"):
        routers.saved("AAAA")
