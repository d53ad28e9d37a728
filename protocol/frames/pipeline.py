"""The messages about a microbatch that link.proto words otherwise than the vocabulary does: those that go along a path,
which it calls a Route, and Settled.

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
    """Path, position, microbatch and lifetime."""

    microbatch: MicrobatchId
    hops: _Hops
    position: Position
    modules: Annotated[tuple[ModuleId, ...], Length(0, MAX_HOPS)]
    lifetime_s: Annotated[float, Range(0, MAX_LIFETIME_MS / 1000)]
    signature: RouteSignature

    def fault(self) -> str | None:
        if self.modules and not self.signature:
            return f"{len(self.modules)} modules that nobody has signed"
        return None

    @property
    def path(self) -> Path:
        signed = SignedRoute(self.modules, self.lifetime_s, self.signature) if self.signature else None
        return Path(self.microbatch.data_node, self.hops, signed)


@dataclass(frozen=True, slots=True)
class _Settled:
    microbatch: MicrobatchId
    hops: _Hops


_ROUTE: Final = converter(_Route, wire.Route.DESCRIPTOR)
_SETTLED: Final = converter(_Settled, wire.Settled.DESCRIPTOR)


def _wire_route(message: MicrobatchTensor | Recall, lifetime_s: float | None = None) -> dict[str, Any]:
    signed = message.path.route or SignedRoute((), 0.0, b"")
    known_s = signed.lifetime_s if lifetime_s is None else lifetime_s
    route = _Route(message.microbatch, message.path.hops, message.position, signed.modules, known_s, signed.signature)
    fields: dict[str, Any] = _ROUTE.write(route, None)
    return fields


def _write_forward(message: Forward, _: Around) -> dict[str, Any]:
    return {"route": _wire_route(message, message.lifetime_s), "purpose": message.purpose.value}


def _read_forward(said: wire.Forward, _: Around) -> Forward:
    route: _Route = _ROUTE.read(said.route, None)
    purpose = read_enum(Purpose, said.purpose, "purpose")
    return faultless(Forward(route.microbatch, route.path, route.position, purpose, route.lifetime_s))


def _write_routed(message: Backward | Recall, _: Around) -> dict[str, Any]:
    return {"route": _wire_route(message)}


def _read_backward(said: wire.Backward, _: Around) -> Backward:
    route: _Route = _ROUTE.read(said.route, None)
    return faultless(Backward(route.microbatch, route.path, route.position))


def _read_recall(said: wire.Recall, _: Around) -> Recall:
    route: _Route = _ROUTE.read(said.route, None)
    return faultless(Recall(route.microbatch, route.path, route.position))


def _read_settled(said: wire.Settled, _: Around) -> Settled:
    settled: _Settled = _SETTLED.read(said, None)
    return Settled(settled.microbatch, Path(settled.microbatch.data_node, settled.hops))


CONVERTERS: Final[dict[type, Converter]] = {
    Forward: Converter(_write_forward, _read_forward),
    Backward: Converter(_write_routed, _read_backward),
    Recall: Converter(_write_routed, _read_recall),
    Settled: Converter(
        lambda settled, _: _SETTLED.write(_Settled(settled.microbatch, settled.path.hops), None), _read_settled
    ),
}
"""By class."""
