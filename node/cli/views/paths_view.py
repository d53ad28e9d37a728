"""How a data node's microbatches travel, as a picture: which stages each of its lanes visits, how often, and where they
wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from node.cli.views.text import count, harmless, number_in, peer_name
from swarm.vocabulary.routing_messages import MAX_LANES

VISITED, SKIPPED = "█", "·"


def paths_views(answer: Mapping[str, Any]) -> Iterator[RenderableType]:
    """For each data node that has lanes a line and a table; `answer` is what `query_status` returns. What a peer says
    of itself may be anything."""
    for peer in answer["peers"]:
        said = peer["answered"]
        if str(peer["module"]).split(".")[0] == "0" and isinstance(said, dict) and (lanes := _lanes(said.get("paths"))):
            yield _headline(str(peer["peer"]), lanes, said["paths"])
            yield _table(said, lanes, int(answer["stages"]))


def _headline(peer: str, lanes: list[dict[str, Any]], paths: Mapping[str, Any]) -> Text:
    line = Text("\npaths of ", style="dim").append(peer_name(peer), style="not dim")
    return line.append(f"  {_trips(lanes)}; {harmless(str(paths.get('talk', '')), 120)}")


def _table(said: Mapping[str, Any], lanes: list[dict[str, Any]], stages: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage")
    table.add_column(f"its lanes in turn: {VISITED} visited, {SKIPPED} skipped", no_wrap=True, overflow="crop")
    for heading in ("visits", "waiting"):
        table.add_column(heading, justify="right")
    waiting = said["paths"].get("waiting_s")
    for stage in range(1, stages):
        drawn = "".join(VISITED if stage in lane["stages"] else SKIPPED for lane in lanes)
        visits = count(number_in(said.get("visits"), str(stage)))
        table.add_row(Text(str(stage)), Text(drawn), Text(visits), Text(_waits(stage, lanes, waiting)))
    return table


def _lanes(paths: Any) -> list[dict[str, Any]]:
    """Those that are well formed."""
    found = paths.get("lanes") if isinstance(paths, dict) else None
    lanes = found if isinstance(found, list) else []
    return [lane for lane in lanes[:MAX_LANES] if isinstance(lane, dict) and _is_route(lane)]


def _is_route(lane: dict[str, Any]) -> bool:
    stages, peers = lane.get("stages"), lane.get("peers")
    if not isinstance(stages, list) or not isinstance(peers, list) or len(stages) != len(peers):
        return False
    return all(isinstance(stage, int) for stage in stages) and all(isinstance(peer, str) for peer in peers)


def _trips(lanes: list[dict[str, Any]]) -> str:
    trips = sorted(number_in(lane, "round_trip_s") for lane in lanes)
    lanes_text = "1 lane" if len(lanes) == 1 else f"{len(lanes)} lanes"
    return f"{lanes_text}, {trips[0]:.2f} to {trips[-1]:.2f} s when nobody waits" if trips[-1] > 0 else lanes_text


def _waits(stage: int, lanes: list[dict[str, Any]], waiting: Any) -> str:
    """Before a computation at the stage's peers, on average over its lanes."""
    peers = [peer for lane in lanes for at, peer in zip(lane["stages"], lane["peers"], strict=True) if at == stage]
    known = [number_in(waiting, peer) for peer in peers if isinstance(waiting, dict) and peer in waiting]
    return f"{count(1e3 * sum(known) / len(known))} ms" if known else "-"
