"""The documents that a data node scores on other experts than their own, in a run whose router goes on learning.

Which these are follows from the seed, the epoch and the documents' names; of each, as much text as one microbatch
holds is scored, without the tokens that its route is chosen by (DiPaCo, arXiv:2403.10616, leaves them out as well).

It stands alone because packing goes on without it where no router learns.
"""

from __future__ import annotations

import numpy as np
import torch

from node.data.documents import Fragment, is_drawn
from node.data.labels import UNSCORED
from node.data.packing import Microbatch, Sample
from node.data.tokenizers import Tokens
from protocol.manifest.manifest import FEWEST_SCORED, Manifest
from protocol.manifest.model import document_cost
from swarm.experts.routes import best_route
from swarm.vocabulary.types import Affinity


class Sampler:
    """The choice of a run's samples, and what of them is scored."""

    def __init__(self, manifest: Manifest) -> None:
        assert manifest.routing is not None, "only a run with a router draws samples"
        self._seed, self._share, self._prefix = manifest.seed, manifest.routing.reshard, manifest.routing.prefix
        self._model, self._room = manifest.model, manifest.microbatch_tokens

    def sample(self, document: Fragment, before: int, labels: Tokens, affinity: Affinity) -> Sample | None:
        """What is to be scored of a document that begins here; None when it was not drawn, or is too short.

        Args:
            before: the token before its first label.
            labels: its tokens and its end, or as many of them as its block has.
        """
        scored = labels[: self._room]
        if scored.size - self._prefix < FEWEST_SCORED:
            return None
        if not is_drawn(f"sample:{self._seed}:{document.start.epoch}:{document.name}", self._share):
            return None
        tokens = np.concatenate(([before], scored[:-1]))
        wanted = np.concatenate((np.full(self._prefix, UNSCORED), scored[self._prefix :]))
        longest = self._model.sequence
        pieces = tuple(min(longest, scored.size - at) for at in range(0, scored.size, longest))
        text = Microbatch(
            torch.from_numpy(tokens).unsqueeze(0),
            torch.from_numpy(wanted).unsqueeze(0),
            sum(document_cost(self._model, piece) for piece in pieces),
            documents=pieces,
            route=best_route(affinity),
            affinity=affinity,
        )
        return Sample(document.opening[: self._prefix].copy(), text)
