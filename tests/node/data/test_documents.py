"""Which documents are read, in which order, by whom."""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.data.documents import (
    FILES_EACH,
    Documents,
    FileShare,
    StreamPosition,
    epoch_order,
    everything,
    is_held_out,
    owner,
)
from node.data.documents import ROWS as LONGEST
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Microbatch
from node.data.tokenizers import ByteTokenizer
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId
from tests.node.hub_on_loopback import COMMIT, NAME, LoopbackHub, serving
from tests.node.small_manifest import small_manifest

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


def documents(*texts: bytes | OSError) -> Documents:
    return Documents(Texts({str(number): text for number, text in enumerate(texts)}), ByteTokenizer(), seed=1)


@given(peers, st.integers(0, 2**63 - 1))
def test_a_document_has_one_owner_and_gets_another_only_when_that_one_leaves(nodes: list[PeerId], seed: int) -> None:
    newcomer = PeerId("newcomer")
    for name in NAMES[:20]:
        before = owner(seed, name, nodes)
        assert before in nodes
        assert before == owner(seed, name, nodes[::-1])
        assert owner(seed, name, [*nodes, newcomer]) in (before, newcomer)


def test_every_data_node_gets_about_its_share_and_the_held_out_share_is_kept_and_depends_on_the_seed() -> None:
    nodes = [PeerId(f"peer{number}") for number in range(4)]
    counts = Counter(owner(7, name, nodes) for name in NAMES)
    assert min(counts[node] for node in nodes) > 70
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


def test_empty_and_vanished_documents_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    fragments = list(documents(b"", b"x", FileNotFoundError(2, "No such file")).epoch(StreamPosition(), everything))
    assert [fragment.tokens.tolist() for fragment in fragments] == [[120, 256]]
    assert "excluding document 2" in caplog.text


def test_a_document_that_was_begun_is_finished_though_it_is_not_wanted_any_more() -> None:
    some = documents(b"abc", b"def")
    first = next(some.epoch(StreamPosition(), everything))
    rest = list(some.epoch(StreamPosition(0, 0, 1), lambda name: False))
    assert [fragment.tokens.tolist() for fragment in rest] == [first.tokens[1:].tolist()]
    assert rest[0].start == StreamPosition(0, 0, 1)


def test_epochs_follow_one_another() -> None:
    found = islice(documents(b"a", b"b").endless(StreamPosition(), everything), 5)
    places = [(fragment.start.epoch, fragment.start.position) for fragment in found]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]


def test_text_that_has_nothing_for_this_data_node_is_an_error_and_no_endless_search() -> None:
    for begin in (StreamPosition(), StreamPosition(0, 1)):
        with pytest.raises(ConfigError, match="none of the 2 documents"):
            next(documents(b"a", b"b").endless(begin, lambda name: False))


A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
FILES, ROWS = 40, 60


def manifest_of(**changes: object) -> Manifest:
    data = {"data__source": f"huggingface:{NAME}", "data__revision": COMMIT, "data__dealt_by": "files"}
    return small_manifest(**data, data__held_out=0.1, model__attention="documents", **changes)


def serve(files: int) -> LoopbackHub:
    """Each row's text is its number, which nothing else is."""
    held = {}
    for file in range(files):
        rows = [{"text": f"row {file * ROWS + row:08}."} for row in range(ROWS)]
        held[f"data/{file:03}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return LoopbackHub(held)


FEW = pytest.mark.parametrize("hub", [FILES_EACH], indirect=True)


@pytest.fixture
def hub(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LoopbackHub]:
    with serving(serve(getattr(request, "param", FILES)), tmp_path / "home") as serves:
        yield serves


def rows_in(microbatches: Iterable[Microbatch]) -> list[int]:
    """The rows whose texts are whole in the microbatches, which those of these lengths are."""
    found = list[int]()
    for microbatch in microbatches:
        said = bytes(token for token in microbatch.tokens.flatten().tolist() if token < 256)
        found += [int(text.removeprefix(b"row ")) for text in said.split(b".") if text]
    return found


def an_epoch(manifest: Manifest, own: PeerId, nodes: tuple[PeerId, ...]) -> set[int]:
    """The rows that a data node reads in its first epoch, and the beginning of the next in the same block."""
    feed = TrainingFeed(manifest, open_documents(manifest), own)
    of_first = list[Microbatch]()
    while (microbatch := feed.next(nodes)).start.block.epoch == 0:
        of_first.append(microbatch)
    return set(rows_in(of_first))


def held_out(manifest: Manifest) -> set[int]:
    return set(rows_in(held_out_microbatches(manifest, 10_000)))


def read_of_two(manifest: Manifest, hub: LoopbackHub) -> tuple[set[str], set[str]]:
    """Checks that two data nodes and the held-out text divide the rows. Returns the files that each fetched."""
    alone = an_epoch(manifest, A, (A,))
    hub.fetched.clear()
    of_a = an_epoch(manifest, A, (A, B))
    files_of_a = set(hub.fetched)
    hub.fetched.clear()
    of_b = an_epoch(manifest, B, (A, B))
    files_of_b = set(hub.fetched)
    assert min(len(of_a), len(of_b)) > 0
    assert not of_a & of_b
    assert of_a | of_b == alone
    assert not alone & held_out(manifest)
    assert alone | held_out(manifest) == set(range(len(hub.files) * ROWS))
    return files_of_a, files_of_b


def test_two_data_nodes_read_all_rows_once_and_fetch_no_file_of_the_other(hub: LoopbackHub) -> None:
    of_a, of_b = read_of_two(manifest_of(), hub)
    assert not of_a & of_b
    assert of_a | of_b == set(hub.files)


def test_an_epoch_has_every_row_once_and_the_files_in_an_order_of_its_own(hub: LoopbackHub) -> None:
    documents = open_documents(manifest_of())
    names = [[fragment.name for fragment in documents.epoch(StreamPosition(epoch), everything)] for epoch in (0, 1)]
    expected = sorted(f"{file}@{row}" for file in hub.files for row in range(ROWS))
    assert sorted(names[0]) == sorted(names[1]) == expected
    assert names[0] != names[1]


@FEW
def test_few_files_are_dealt_by_rows(hub: LoopbackHub) -> None:
    of_a, of_b = read_of_two(manifest_of(), hub)
    assert of_a == of_b == set(hub.files)


def test_a_newcomer_takes_files_and_no_others_change_hands() -> None:
    files = [f"{number}.parquet" for number in range(FILES_EACH * 3)]
    shares = {own: FileShare(own, len(files), partial(owner, 1)) for own in (A, B, C)}
    for file in files:
        (before,) = (own for own in (A, B) if shares[own].has_file(file, (A, B)))
        (after,) = (own for own in (A, B, C) if shares[own].has_file(file, (A, B, C)))
        assert after in (before, C)
        assert [own for own in (A, B, C) if shares[own].has_row(f"{file}@7", (A, B, C))] == [after]
    assert all(any(share.has_file(file, (A, B, C)) for file in files) for share in shares.values())


def test_a_feed_goes_on_at_its_cursor_and_fetches_only_what_is_due_there(hub: LoopbackHub) -> None:
    manifest = manifest_of()
    feed = TrainingFeed(manifest, open_documents(manifest), A)
    given = [feed.next((A, B)) for _ in range(600)]
    assert given[-1].end.block.epoch > 0
    assert len({microbatch.start.block for microbatch in given}) > 2, "or nothing is shown"
    for index in range(0, 600, 57):
        hub.fetched.clear()
        again = TrainingFeed(manifest, open_documents(manifest), A, given[index].start)
        assert [again.next((A, B)).tokens.tolist() for _ in range(20)] == [
            microbatch.tokens.tolist() for microbatch in given[index : index + 20]
        ]
        block = given[index].start.block
        due = epoch_order(manifest.seed, block.epoch, FILES)[block.position // LONGEST]
        if block.position % LONGEST:
            assert sorted(hub.files)[due] in hub.fetched[:2], "beside the next one, which is fetched ahead"


def test_held_out_text_and_the_first_document_come_from_one_file(hub: LoopbackHub) -> None:
    manifest = manifest_of()
    first = sorted(hub.files)[epoch_order(manifest.seed, 0, FILES)[0]]
    assert rows_in(held_out_microbatches(manifest, 1))
    assert hub.fetched == [first]
    hub.fetched.clear()
    hub.gates = {name: threading.Event() for name in hub.files if name != first}
    assert next(open_documents(manifest).endless(StreamPosition(), everything)).name.startswith(first)
    assert hub.fetched == [first]
    for gate in hub.gates.values():
        gate.set()


def test_a_file_that_is_another_s_by_now_is_left_and_a_document_that_was_begun_is_finished(hub: LoopbackHub) -> None:
    documents = open_documents(manifest_of())
    allowed = set(hub.files)
    reading = documents.epoch(StreamPosition(), everything, allowed.__contains__)
    first, second = next(reading), next(reading)
    allowed.discard(first.name.partition("@")[0])
    assert next(reading).start == StreamPosition(0, LONGEST)
    begun = StreamPosition(second.start.epoch, second.start.position, 3)
    rest = documents.epoch(begun, everything, allowed.__contains__)
    assert next(rest).tokens.tolist() == second.tokens.tolist()[3:]
    assert next(rest).start == StreamPosition(0, LONGEST)


def test_a_row_that_is_none_is_left_out(hub: LoopbackHub, caplog: pytest.LogCaptureFixture) -> None:
    for name in hub.files:
        hub.files[name] = b"no JSON\n" + hub.files[name]
    manifest = manifest_of()
    assert an_epoch(manifest, A, (A,)) | held_out(manifest) == set(range(FILES * ROWS))
    assert "jsonl@0: the row is not JSON" in caplog.text


@FEW
def test_nothing_for_this_data_node_is_said(hub: LoopbackHub) -> None:
    for name in hub.files:
        hub.files[name] = b'{"other": 1}\n'
    with pytest.raises(ConfigError, match=f"none of the {FILES_EACH} files"):
        TrainingFeed(manifest_of(), open_documents(manifest_of()), A).next()
