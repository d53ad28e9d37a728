"""A node that computes honestly and cheats in rounds: `python -m tests.security.liar KIND join ...`.

KIND is one of `CLAIMS` or `LIES`. Options follow a colon: `reverse:factor=-5,tokens=8,norm=5,after=600` cheats from
600 s on. The rest is the real node, so it is invited, leads and reduces in turn.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lab.lying_node import multiplied
from node.__main__ import main
from node.averaging import module_rounds as service
from node.averaging.anchor.anchor import Anchor, version_of
from node.averaging.anchor.outer_step import LocalReplica
from node.averaging.anchor.shared_vector import Vector
from node.averaging.exchange.pieces import Piece
from node.averaging.exchange.reduction import Reduction
from node.averaging.round_runner import ReplicaSync, Snapshot
from node.data.feed import TrainingFeed
from node.data.packing import Microbatch
from node.pipeline.runner import Job, Output
from node.pipeline.worker import HopWorker
from protocol.identity.signatures import EntrySigner
from swarm.averaging import leader as convening
from swarm.averaging.trust import UsualLength
from swarm.vocabulary.averaging_messages import Entry, RoundId, SignedRoster
from swarm.vocabulary.types import MAX_ROUND, AnchorVersion

FIRST_LIE = 3


@dataclass(frozen=True, slots=True)
class Claim:
    """Factors of the pseudo-gradient, its declared norm (None: as the gradient) and the claimed tokens."""

    factor: float = 1.0
    tokens: float = 1.0
    norm: float | None = None
    noise: bool = False  # a fixed random direction, the same for all liars

    def install(self) -> None:
        claim, honestly, sign = self, ReplicaSync.snapshot, EntrySigner.sign

        async def snapshot(self: ReplicaSync) -> Snapshot:
            honest = await honestly(self)
            norm = abs(claim.factor) * 1.001 if claim.norm is None else claim.norm
            source = multiplied(honest.source, claim.factor, noise=claim.noise)
            return replace(honest, source=source, norm=honest.norm * norm)

        def signed(self: EntrySigner, entry: Entry) -> Entry:
            return sign(self, replace(entry, tokens=round(entry.tokens * claim.tokens)))

        ReplicaSync.snapshot = snapshot  # type: ignore[method-assign]
        EntrySigner.sign = signed  # type: ignore[method-assign]
        UsualLength.too_short = lambda *_: False  # type: ignore[method-assign]  # beside its own, all updates are short


CLAIMS = {
    "reverse": Claim(-3.0, 4),
    "ordinary": Claim(-1.0),
    "noise": Claim(3.0, 4, noise=True),
    "drift": Claim(1.5, noise=True),
    "sched": Claim(tokens=64),
    "nan": Claim(float("nan"), norm=1.0),
    "million": Claim(1e6, norm=1.0),
}


def another_mean(change: Callable[[Vector], Vector]) -> Callable[[], None]:
    """What it reduces comes out as something else, for all alike, itself included."""
    honestly = Reduction.finish

    def finish(self: Reduction, piece: Piece) -> memoryview:
        mean = np.frombuffer(honestly(self, piece), dtype=np.float32)
        others = len(self._plan.others) > 1
        return np.ascontiguousarray(change(mean) if others else mean, np.float32).view(np.uint8).data

    return partial(setattr, Reduction, "finish", finish)


def forged_rosters() -> None:
    """As leader, only its own update counts: reversed and a thousand times as long."""
    honestly = convening.messages.SignedRoster

    def forge(number: RoundId, base: AnchorVersion, entries: tuple[Entry, ...], *codec: Any) -> SignedRoster:
        forged = (e if e.peer == number.convener else replace(e, tokens=1, steps=1, norm=0.001) for e in entries)
        return honestly(number, base, tuple(forged) if base.round >= FIRST_LIE else entries, *codec)

    Claim(-1000.0).install()
    convening.messages = SimpleNamespace(**vars(convening.messages) | {"SignedRoster": forge})  # type: ignore[assignment]


def another_claim(**claim: int) -> Callable[[], None]:
    """Its entries claim other work than it has done, and it signs that."""
    honestly = EntrySigner.sign

    def sign(self: EntrySigner, entry: Entry) -> Entry:
        return honestly(self, replace(entry, **claim) if entry.base.round >= FIRST_LIE else entry)  # type: ignore[arg-type]

    return partial(setattr, EntrySigner, "sign", sign)


def another_anchor(number: int, steps: int) -> Callable[[], None]:
    """In a young run it begins with an anchor that claims to be of a later round."""
    honestly = service.anchor_of

    def anchor_of(replica: LocalReplica) -> Anchor:
        anchor = honestly(replica)
        return replace(anchor, version=version_of(anchor.layout, anchor.hashes, number, steps, 1, 0))

    return partial(setattr, service, "anchor_of", anchor_of)


def spoiled_microbatches() -> None:
    """What it computes is no answer to what came, out and back."""
    honestly = HopWorker._forward

    def forward(self: HopWorker, job: Job, source: torch.Tensor) -> Output:
        return honestly(self, job, torch.randn_like(source) * source.std())

    HopWorker._forward = forward  # type: ignore[method-assign]


def other_labels() -> None:
    """A data node that trains on its text with labels in another order."""
    honestly = TrainingFeed.next

    def packed(self: TrainingFeed, *data_nodes: Any) -> Microbatch:
        text = honestly(self, *data_nodes)
        return replace(text, labels=text.labels.flatten()[torch.randperm(text.size)].view_as(text.labels))

    TrainingFeed.next = packed  # type: ignore[method-assign]


LIES: dict[str, Callable[[], None]] = {
    "honest": lambda: None,  # for comparison
    "mean-reversed": another_mean(np.negative),
    "mean-elsewhere": another_mean(lambda mean: np.roll(mean, len(mean) // 2 + 1)),
    "forged-rosters": forged_rosters,
    "spoils": spoiled_microbatches,
    "labels": other_labels,
    "steps": another_claim(steps=2**32),
    "tokens": another_claim(tokens=2**48),
    "last-number": another_anchor(MAX_ROUND, 1),
    "ahead": another_anchor(50_000, 2_500_000),
}


def begin(kind: str) -> None:
    """Installs the lie, at once or `after` seconds of honest work."""
    name, _, options = kind.partition(":")
    given = {key: float(value) for key, _, value in (each.partition("=") for each in options.split(",") if each)}
    after = given.pop("after", 0.0)
    install = replace(CLAIMS[name], **given).install if name in CLAIMS else LIES[name]  # type: ignore[arg-type]
    if after:
        timer = threading.Timer(after, install)
        timer.daemon = True
        timer.start()
    else:
        install()


if __name__ == "__main__":
    begin(sys.argv.pop(1))
    main()
