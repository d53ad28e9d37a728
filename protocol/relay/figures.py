"""What a relaying peer has carried, for its owner to see."""

from __future__ import annotations

import dataclasses

from protocol.generated import dht_process_pb2


@dataclasses.dataclass(frozen=True, slots=True)
class RelayFigures:
    """What was given, and what is left. The names are those of `DhtRelayFigures` (proto/dht_process.proto)."""

    carried_bytes: int = 0
    left_bytes: int = 0
    attached: int = 0
    tunnels: int = 0
    opened: int = 0
    refused: int = 0
    cut_off: int = 0


def write_figures(figures: RelayFigures) -> dht_process_pb2.DhtRelayFigures:
    return dht_process_pb2.DhtRelayFigures(**dataclasses.asdict(figures))


def read_figures(message: dht_process_pb2.DhtRelayFigures) -> RelayFigures:
    return RelayFigures(**{field.name: getattr(message, field.name) for field in dataclasses.fields(RelayFigures)})
