"""One part computed by several devices at once: each takes some of a microbatch's documents. Gradients are summed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from node.concurrency.device_threads import DeviceThreads
from node.model import passes
from node.model.cut_documents import CutDocuments, Exchange
from node.model.optimizer import are_finite, fold
from node.model.parts import HeadPart
from node.model.passes import Around, Gradients, HeadPasses, HeadVisit, OneDevice, OneHead, Passes, Visit
from swarm.workload.device_shares import CUTTING, Dealing, deal, pieces

Result = TypeVar("Result")

SHORTEST_CUT: Final = 512
"""Tokens for each device below which documents are not cut."""


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    places: Tensor
    """Indices of its rows, or of its tokens in the only row: int64 on the CPU."""
    documents: tuple[int, ...] | CutDocuments


@dataclass(frozen=True, slots=True, eq=False)
class _Dealt:
    """A microbatch's shares, for each device; None for a device that has nothing to do."""

    axis: int
    """Of the places: 0 for rows, 1 for tokens."""
    shares: tuple[_Share | None, ...]
    exchange: Exchange

    def part_of(self, whole: Tensor, rank: int, device: torch.device) -> Tensor:
        share = self.shares[rank]
        assert share is not None
        return whole.index_select(self.axis, share.places.to(whole.device)).to(device)

    def together(self, whole: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
        """The parts in their places of a tensor like `whole`."""
        for share, part in zip(self.shares, parts, strict=True):
            if share is not None and part is not None:
                whole.index_copy_(self.axis, share.places.to(whole.device), part.to(whole.device))
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class DealtVisit(Visit):
    """A visit of which several devices hold a part each."""

    dealt: _Dealt
    parts: tuple[Visit | None, ...]


class Copies:
    """A part on each of several devices. Those with other memory than the first have copies of the parameters."""

    def __init__(self, part: nn.Module, threads: DeviceThreads, copies: Sequence[nn.Module] | None = None) -> None:
        self._parts = [part, *(copies or (_on(device, part) for device in threads.devices[1:]))]
        self._stale = False

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._parts)

    def changed(self) -> None:
        """Notes that the part's parameters have changed; the others follow when they are needed."""
        self._stale = True

    def fresh(self) -> Sequence[nn.Module]:
        """All of them, with the parameters of now."""
        if self._stale:
            self._stale = False
            first, *others = self._parts
            with torch.no_grad():
                for other in others:
                    if other is not first:
                        for new, parameter in zip(first.parameters(), other.parameters(), strict=True):
                            parameter.copy_(new)
        return self._parts


class SeveralDevices:
    """The passes of one part on several devices; see `node.model.passes.Passes`.

    Args:
        quadratic_share: cost of attention, in tokens per squared token of a document.
        choose: deals documents by costs, number of devices and extra cost of cutting.
    """

    def __init__(
        self,
        parts: Copies,
        threads: DeviceThreads,
        quadratic_share: float,
        choose: Callable[[Sequence[float], int, float], Dealing] = lambda *given: deal(*given).value,
    ) -> None:
        self._threads = threads
        self._parts = parts
        self._quadratic_share = quadratic_share
        self._choose = choose

    def forward(self, source: Tensor, documents: tuple[int, ...], around: Around = nullcontext) -> Visit:
        dealt = self._dealt(source, documents)

        def on(rank: int, part: nn.Module, share: _Share) -> Visit:
            own = dealt.part_of(source, rank, _device_of(part))
            return passes.forward(part, own, share.documents, around=around)

        visits = self._at_once(dealt, on)
        results = [None if visit is None else visit.result.detach() for visit in visits]
        return DealtVisit(source, _joined(dealt, source, results), dealt, tuple(visits))

    def backward(self, visit: Visit, gradient: Tensor) -> Gradients:
        assert isinstance(visit, DealtVisit)

        def on(rank: int, part: nn.Module, _: _Share) -> Gradients:
            own = visit.parts[rank]
            assert own is not None
            return passes.backward(part, own, visit.dealt.part_of(gradient, rank, _device_of(part)))

        found = self._at_once(visit.dealt, on)
        computed = [gradients for gradients in found if gradients is not None]
        sums = [_sum(of_one) for of_one in zip(*(gradients.parameters for gradients in computed), strict=True)]
        sources = [None if gradients is None else gradients.source for gradients in found]
        if computed[0].source is None:
            return Gradients(None, tuple(sums))
        return Gradients(_joined(visit.dealt, visit.source, sources), tuple(sums))

    def evaluate(self, source: Tensor, documents: tuple[int, ...]) -> Tensor:
        dealt = self._dealt(source, documents)

        def on(rank: int, part: nn.Module, share: _Share) -> Tensor:
            with torch.no_grad():
                result: Tensor = part(dealt.part_of(source, rank, _device_of(part)), share.documents)
            return result

        return _joined(dealt, source, self._at_once(dealt, on))

    def parameters_changed(self) -> None:
        self._parts.changed()

    def storages(self) -> set[int]:
        return {storage for part in self._parts for storage in passes.storages(part)}

    def weights(self) -> tuple[Tensor, ...]:
        return ()

    def _at_once(self, dealt: _Dealt, job: Callable[[int, nn.Module, _Share], Result]) -> list[Result | None]:
        def on(rank: int, part: nn.Module) -> Result | None:
            share = dealt.shares[rank]
            try:
                return None if share is None else job(rank, part, share)
            except BaseException:
                dealt.exchange.give_up()
                raise

        return self._threads.at_once([partial(on, rank, part) for rank, part in enumerate(self._parts.fresh())])

    def _dealt(self, source: Tensor, documents: tuple[int, ...]) -> _Dealt:
        """The shares of a microbatch: a function of its documents, so that what is taken back is what was added."""
        count = len(self._parts)
        exchange = Exchange(count)
        if not documents:
            rows = self._choose([1.0] * source.shape[0], count, float("inf")).whole
            return _Dealt(0, tuple(_Share(torch.tensor(own), ()) if own else None for own in rows), exchange)
        costs = [length + self._quadratic_share * length**2 for length in documents]
        found = self._choose(costs, count, CUTTING if max(documents) >= SHORTEST_CUT * count else float("inf"))
        starts = [0, *accumulate(documents)]
        cut = tuple(pieces(documents[index], found.shares) for index in found.cut)
        shares: list[_Share | None] = []
        for rank, own in enumerate(found.whole):
            spans = [range(starts[index], starts[index + 1]) for index in own] + [
                range(starts[index] + part.start, starts[index] + part.stop)
                for index, by_rank in zip(found.cut, cut, strict=True)
                for part in by_rank[rank]
            ]
            if not spans:
                shares.append(None)
                continue
            places = torch.cat([torch.arange(span.start, span.stop) for span in spans])
            whole = tuple(documents[index] for index in own)
            lengths = tuple(documents[index] for index in found.cut)
            shares.append(_Share(places, CutDocuments(rank, whole, lengths, cut, exchange) if cut else whole))
        return _Dealt(1, tuple(shares), exchange)


class SeveralHeads:
    """The head on several devices, each with an equal share of the tokens; see `node.model.passes.HeadPasses`."""

    def __init__(self, heads: Copies, threads: DeviceThreads) -> None:
        self._heads = heads
        self._threads = threads

    def loss(self, hidden: Tensor, labels: Tensor) -> float:
        def on(head: nn.Module, own: Tensor, wanted: Tensor) -> float:
            with torch.no_grad():
                return float(head(own, wanted).item())

        return self._weighted(self._at_once(hidden, labels, on), labels)

    def loss_into(self, hidden: Tensor, labels: Tensor, sums: Sequence[Tensor], weight: int) -> HeadVisit | None:
        loss, gradients = self._loss_and_gradients(hidden, labels)
        if not are_finite(gradients.parameters):
            return None
        assert gradients.source is not None
        if sums:
            fold(sums, gradients.parameters, weight)
        return HeadVisit(loss, gradients.source, lambda: fold(sums, gradients.parameters, -weight))

    def _loss_and_gradients(self, hidden: Tensor, labels: Tensor) -> tuple[float, Gradients]:
        def on(head: nn.Module, own: Tensor, wanted: Tensor) -> tuple[float, Gradients]:
            visit = passes.forward(head, own, wanted)
            weight = visit.result.new_tensor(wanted.numel() / labels.numel())
            return float(visit.result.item()), passes.backward(head, visit, weight)

        found = self._at_once(hidden, labels, on)
        of_each = [gradients for _, gradients in found]
        sums = [_sum(of_one) for of_one in zip(*(gradients.parameters for gradients in of_each), strict=True)]
        sources = [gradients.source.to(hidden.device) for gradients in of_each if gradients.source is not None]
        together = torch.cat(sources, dim=1).view_as(hidden)
        return self._weighted([loss for loss, _ in found], labels), Gradients(together, tuple(sums))

    def parameters_changed(self) -> None:
        self._heads.changed()

    def _at_once(
        self, hidden: Tensor, labels: Tensor, job: Callable[[nn.Module, Tensor, Tensor], Result]
    ) -> list[Result]:
        """Of as many tokens as are not left out: fewer than there are devices have fewer jobs."""
        own = torch.tensor_split(hidden.flatten(0, 1).unsqueeze(0), len(self._heads), dim=1)
        wanted = torch.tensor_split(labels.flatten().unsqueeze(0), len(self._heads), dim=1)

        def on(head: nn.Module, own: Tensor, wanted: Tensor) -> Result | None:
            if not wanted.numel():
                return None
            return job(head, own.to(_device_of(head)), wanted.to(_device_of(head)))

        given = zip(self._heads.fresh(), own, wanted, strict=True)
        found = self._threads.at_once([partial(on, *of_one) for of_one in given])
        return [result for result in found if result is not None]

    def _weighted(self, losses: Sequence[float], labels: Tensor) -> float:
        counts = [part.numel() for part in torch.tensor_split(labels.flatten(), len(self._heads))]
        return sum(loss * count for loss, count in zip(losses, counts, strict=False)) / labels.numel()


def body_passes(part: nn.Module, threads: DeviceThreads | None, quadratic_share: float) -> Passes:
    """The passes of a part that is on the first device: the embedding or a stack of blocks."""
    if threads is None or len(threads.devices) == 1:
        return OneDevice(part)
    return SeveralDevices(Copies(part, threads), threads, quadratic_share)


def head_passes(head: HeadPart, threads: DeviceThreads | None) -> HeadPasses:
    """The passes of the head, which is on the first device."""
    if threads is None or len(threads.devices) == 1:
        return OneHead(head)
    return SeveralHeads(Copies(head, threads), threads)


def _on(device: torch.device, part: nn.Module) -> nn.Module:
    """The part on that device: itself where it is there."""
    return part if _device_of(part) == device else copy.deepcopy(part).to(device)


def _device_of(part: nn.Module) -> torch.device:
    return next(part.parameters()).device


def _joined(dealt: _Dealt, like: Tensor, parts: Sequence[Tensor | None]) -> Tensor:
    """The parts' results in the order of the microbatch, [rows, tokens, hidden] on the device of `like`."""
    of_one = next(part for part in parts if part is not None)
    room = torch.empty(*like.shape[:2], *of_one.shape[2:], dtype=of_one.dtype, device=like.device)
    return dealt.together(room, parts)


def _sum(gradients: Sequence[Tensor]) -> Tensor:
    """The sum on the first one's device, always in the same order."""
    total = gradients[0]
    for more in gradients[1:]:
        total = total + more.to(total.device)
    return total
