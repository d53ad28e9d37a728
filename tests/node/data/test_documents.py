"""Which documents are read, in which order, by whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.documents import Documents, Place, epoch_order, is_held_out, owner
from node.data.tokenizers import ByteTokenizer
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId

NAMES = [f"folder/file{index}.py" for index in range(400)]
peers = st.lists(st.integers(0, 30).map(lambda n: PeerId(f"peer{n}")), min_size=1, max_size=6, unique=True).map(sorted)


class Texts:
    """A source in memory; an OSError stands for a file that is gone."""

    def __init__(self, texts: dict[str, bytes | OSError]) -> None:
        self._texts = texts
        self.names: Sequence[str] = sorted(texts)

    def read(self, name: str) -> bytes:
        text = self._texts[name]
        if isinstance(text, OSError):
            raise text
        return text


def everything(name: str) -> bool:
    return True


def documents(*texts: bytes | OSError) -> Documents:
    return Documents(Texts({str(number): text for number, text in enumerate(texts)}), ByteTokenizer(), seed=1)


@given(peers, st.integers(0, 2**63 - 1))
def test_data_nodes_partition_the_documents_whatever_order_they_are_named_in(nodes: list[PeerId], seed: int) -> None:
    for name in NAMES[:20]:
        assert owner(seed, name, nodes) == owner(seed, name, nodes[::-1])
        assert owner(seed, name, nodes) in nodes


@given(peers, st.integers(0, 100))
def test_only_the_documents_of_a_leaving_data_node_change_hands(nodes: list[PeerId], seed: int) -> None:
    newcomer = PeerId("newcomer")
    for name in NAMES[:50]:
        after = owner(seed, name, [*nodes, newcomer])
        assert after in (owner(seed, name, nodes), newcomer)


def test_every_data_node_gets_about_its_share() -> None:
    nodes = [PeerId(f"peer{number}") for number in range(4)]
    counts = [sum(owner(7, name, nodes) == node for name in NAMES) for node in nodes]
    assert sum(counts) == 400
    assert min(counts) > 70


def test_the_held_out_share_is_kept_and_depends_on_the_seed() -> None:
    chosen = {seed: {name for name in NAMES if is_held_out(seed, name, 0.25)} for seed in (1, 2)}
    assert 70 < len(chosen[1]) < 130
    assert chosen[1] != chosen[2]
    assert not any(is_held_out(1, name, 0.0) for name in NAMES)
    assert chosen[1] < {name for name in NAMES if is_held_out(1, name, 0.5)}


def test_these_choices_are_the_same_on_every_machine() -> None:
    """Literals: two data nodes that disagree would train on held-out text or read documents twice."""
    assert epoch_order(1, 0, 8).tolist() == [3, 6, 7, 4, 1, 0, 2, 5]
    assert [n for n in range(30) if is_held_out(1, f"{n}", 0.2)] == [11, 24, 28]
    assert [owner(1, f"{n}", [PeerId("a"), PeerId("b")]) for n in range(8)] == list("aaaaabab")


@given(st.integers(0, 200), st.integers(0, 5))
def test_every_epoch_is_a_permutation(count: int, epoch: int) -> None:
    assert sorted(epoch_order(3, epoch, count).tolist()) == list(range(count))


def test_epochs_differ() -> None:
    assert epoch_order(3, 0, 50).tolist() != epoch_order(3, 1, 50).tolist()


def test_each_document_ends_with_the_end_of_document() -> None:
    fragments = list(documents(b"ab", b"cd").epoch(Place(), everything))
    assert sorted(fragment.tokens.tolist() for fragment in fragments) == [[97, 98, 256], [99, 100, 256]]


def test_empty_and_vanished_documents_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    fragments = list(documents(b"", b"x", FileNotFoundError(2, "No such file")).epoch(Place(), everything))
    assert [fragment.tokens.tolist() for fragment in fragments] == [[120, 256]]
    assert "document 2 is left out" in caplog.text


def test_a_document_that_was_begun_is_finished_though_it_is_not_wanted_any_more() -> None:
    some = documents(b"abc", b"def")
    first = next(some.epoch(Place(), everything))
    rest = list(some.epoch(Place(0, 0, 1), lambda name: False))
    assert [fragment.tokens.tolist() for fragment in rest] == [first.tokens[1:].tolist()]
    assert rest[0].start == Place(0, 0, 1)


def test_epochs_follow_one_another() -> None:
    places = [fragment.start for fragment in islice(documents(b"a", b"b").endless(Place(), everything), 5)]
    assert places == [Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1), Place(2, 0)]


def test_text_that_has_nothing_for_this_data_node_is_an_error_and_no_endless_search() -> None:
    with pytest.raises(ConfigError, match="none of the 2 documents"):
        next(documents(b"a", b"b").endless(Place(), lambda name: False))
    with pytest.raises(ConfigError):
        next(documents(b"a", b"b").endless(Place(0, 1), lambda name: False))
