"""A data node's training and evaluation microbatches. Reads files: call it from a thread, not from the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from node.data.documents import Documents, Fragment, Place, is_held_out, owner
from node.data.packing import Cursor, Microbatch, Packer
from node.data.places import Places, as_written
from node.data.sources import open_source
from node.data.tokenizers import open_tokenizer
from protocol.manifest.manifest import Manifest, training_flops_per_token
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId

START: Final = Cursor()


def open_documents(manifest: Manifest, where: Places | None = None) -> Documents:
    """Opens the manifest's source and tokenizer on this machine.

    Args:
        where: what may be opened; None for what is written in a manifest of one's own.

    Raises:
        ConfigError, ManifestError: as `open_source` and `open_tokenizer`.
    """
    where = where or as_written(manifest.data)
    return Documents(open_source(manifest.data, where.text), open_tokenizer(manifest, where.tokenizer), manifest.seed)


class TrainingFeed:
    """One data node's microbatches: its share of the documents that are not held out, epoch after epoch."""

    def __init__(self, manifest: Manifest, documents: Documents, own: PeerId, start: Cursor = START) -> None:
        self._manifest = manifest
        self._own = own
        self._data_nodes: tuple[PeerId, ...] = (own,)
        self._packer = _packer(manifest, documents.endless(start.block, self._is_mine), start)

    @property
    def cursor(self) -> Cursor:
        """The place where the next microbatch begins; a feed started there, with the same data nodes, gives the same
        ones.
        """
        return self._packer.cursor

    def next(self, data_nodes: tuple[PeerId, ...] = ()) -> Microbatch:
        """The next microbatch, when these data nodes are live (this one always counts as live).

        A change of the data nodes takes effect with the next block of the packer.

        Raises:
            ConfigError: a whole epoch has nothing for this data node.
        """
        self._data_nodes = tuple(sorted({*data_nodes, self._own}))
        microbatch = self._packer.next()
        assert microbatch is not None, "epochs do not end"
        return microbatch

    def _is_mine(self, name: str) -> bool:
        if is_held_out(self._manifest.seed, name, self._manifest.data.held_out):
            return False
        return len(self._data_nodes) == 1 or owner(self._manifest.seed, name, self._data_nodes) == self._own


def held_out_microbatches(manifest: Manifest, count: int, documents: Documents | None = None) -> Iterator[Microbatch]:
    """The first `count` microbatches of the held-out documents, or as many whole ones as there are.

    Raises:
        ConfigError: the held-out text does not fill one; also as `open_documents`.
    """
    seed, share = manifest.seed, manifest.data.held_out
    fragments = (documents or open_documents(manifest)).epoch(Place(), lambda name: is_held_out(seed, name, share))
    packer = _packer(manifest, fragments, START)
    for number in range(count):
        microbatch = packer.next()
        if microbatch is None and number == 0:
            raise ConfigError(
                f"the held-out documents (data.held_out = {share}) have less text than one microbatch of"
                f" {manifest.microbatch_tokens} tokens",
                hint="Use more text, or make a run with a larger data.held_out.",
            )
        if microbatch is None:
            return
        yield microbatch


def _packer(manifest: Manifest, fragments: Iterator[Fragment], start: Cursor) -> Packer:
    return Packer(
        fragments,
        rows=manifest.training.rows,
        sequence=manifest.model.sequence,
        seed=manifest.seed,
        start=start,
        cost_flops=training_flops_per_token(manifest) * manifest.microbatch_tokens,
    )
