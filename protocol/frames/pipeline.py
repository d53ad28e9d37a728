"""Converters of the microbatch messages that link.proto words otherwise than the vocabulary: those along a path, which
it calls a Route, and Settled.

Whether the data node has signed the route is asked where the run is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

from protocol.frames.codec import Around, Converter, converter, faultless
from protocol.frames.fields import read_enum
from protocol.generated import link_pb2 as wire
from swarm.vocabulary.bounds import Length, Range
from swarm.vocabulary.pipeline_messages import (
    Backward,
    Documents,
    Forward,
    MicrobatchTensor,
    Position,
    Purpose,
    Recall,
    RouteSignature,
    Settled,
)
from swarm.vocabulary.types import MAX_HOPS, Hop, MicrobatchId, ModuleId, Path, SignedRoute

MAX_LIFETIME_MS: Final = 3_600_000

_Hops = Annotated[tuple[Hop, ...], Length(0, MAX_HOPS)]


@dataclass(frozen=True, slots=True)
class _Route:
    microbatch: MicrobatchId
    hops: _Hops
    position: Position
    modules: Annotated[tuple[ModuleId, ...], Length(0, MAX_HOPS)]
    lifetime_s: Annotated[float, Range(0, MAX_LIFETIME_MS / 1000)]
    signature: RouteSignature
    documents: Documents
    labels: Annotated[int, Range(0, 2**32 - 1)]

    def fault(self) -> str | None:
        """Why no microbatch goes this way; None when one may."""
        if (self.modules or self.documents or self.labels) and not self.signature:
            what = f"{len(self.modules)} modules, {len(self.documents)} documents and {self.labels} labels"
            return f"{what} that nobody has signed"
        return None

    @property
    def path(self) -> Path:
        signed = None
        if self.signature:
            signed = SignedRoute(self.modules, self.lifetime_s, self.signature, self.documents, self.labels)
        return Path(self.microbatch.data_node, self.hops, signed)


@dataclass(frozen=True, slots=True)
class _Settled:
    microbatch: MicrobatchId
    hops: _Hops


_ROUTE: Final = converter(_Route, wire.Route.DESCRIPTOR)
_SETTLED: Final = converter(_Settled, wire.Settled.DESCRIPTOR)


def _write_route(message: MicrobatchTensor | Recall, _: Around) -> dict[str, Any]:
    path, signed = message.path, message.path.route or SignedRoute((), 0.0, b"")
    lifetime_s = message.lifetime_s if isinstance(message, Forward) else signed.lifetime_s
    route = _Route(
        message.microbatch,
        path.hops,
        message.position,
        signed.modules,
        lifetime_s,
        signed.signature,
        signed.documents,
        signed.labels,
    )
    return {"route": _ROUTE.write(route, None)}


def _write_forward(message: Forward, _: Around) -> dict[str, Any]:
    return {**_write_route(message, None), "purpose": message.purpose.value}


def _read_forward(said: wire.Forward, _: Around) -> Forward:
    route: _Route = _ROUTE.read(said.route, None)
    purpose = read_enum(Purpose, said.purpose, "purpose")
    return faultless(Forward(route.microbatch, route.path, route.position, purpose, route.lifetime_s))


def _read_routed(kind: type[Backward | Recall], said: wire.Backward | wire.Recall) -> Backward | Recall:
    route: _Route = _ROUTE.read(said.route, None)
    return faultless(kind(route.microbatch, route.path, route.position))


def _write_settled(message: Settled, _: Around) -> Any:
    return _SETTLED.write(_Settled(message.microbatch, message.path.hops), None)


def _read_settled(said: wire.Settled, _: Around) -> Settled:
    settled: _Settled = _SETTLED.read(said, None)
    return Settled(settled.microbatch, Path(settled.microbatch.data_node, settled.hops))


CONVERTERS: Final[dict[type, Converter]] = {
    Forward: Converter(_write_forward, _read_forward),
    Backward: Converter(_write_route, lambda said, _: _read_routed(Backward, said)),
    Recall: Converter(_write_route, lambda said, _: _read_routed(Recall, said)),
    Settled: Converter(_write_settled, _read_settled),
}
"""By class."""
