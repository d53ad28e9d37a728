"""The state of a run as Prometheus reads it, in base units."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from node.observability.status import PeerStatus, SwarmStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics(status: SwarmStatus, own: tuple[str, ...]) -> bytes:
    """Returns the text of a scrape: the run, and the peers of this node; for a visitor, all peers."""
    from prometheus_client import generate_latest

    peers = [peer for peer in status.peers if peer.answered is not None and (not own or peer.peer in own)]
    families: Any = SimpleNamespace(collect=lambda: (*_of_run(status), *_of_peers(peers)))
    return generate_latest(families)


def _of_run(run: SwarmStatus) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    for name, about, value in (
        ("loss", "Training loss in nats per token", run.loss),
        ("step", "Steps of the foremost data node", run.step),
        ("run_tokens_per_second", "Tokens that the run trains on per second", run.tokens_per_s),
        ("peers", "Peers that host a module", sum(peer.module is not None for peer in run.peers)),
        ("modules_without_peer", "Modules that no peer serves", len(run.waiting_for)),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"skipstone_{name}", about, value=value)


def _of_peers(peers: list[PeerStatus]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def moved(peer: PeerStatus, way: str) -> int:
        return sum(getattr(each, f"{way}_bytes") for each in (peer.said.traffic or {}).values())

    def busy_s(peer: PeerStatus) -> float:
        return 0.0 if peer.said.compute is None else peer.said.compute.busy_s

    for kind, name, about, of in (
        (CounterMetricFamily, "tokens", "Tokens in accumulated microbatches", lambda p: p.said.tokens),
        (CounterMetricFamily, "inner_steps", "Inner steps", lambda p: p.said.steps),
        (CounterMetricFamily, "microbatches", "Gradients added", lambda p: p.said.accumulated),
        (CounterMetricFamily, "rounds", "Averaging rounds", lambda p: p.said.round),
        (CounterMetricFamily, "busy_seconds", "Time in which the device computed", busy_s),
        (CounterMetricFamily, "sent_bytes", "Bytes sent on links", lambda p: moved(p, "sent")),
        (CounterMetricFamily, "received_bytes", "Bytes received on links", lambda p: moved(p, "received")),
        (GaugeMetricFamily, "tokens_per_second", "Tokens per second", lambda p: p.said.tokens_per_s),
        (GaugeMetricFamily, "slots", "Slots for microbatches", lambda p: p.slots),
        (GaugeMetricFamily, "free_slots", "Free slots", lambda p: p.free_slots),
        (GaugeMetricFamily, "serving", "1 while the module is served", lambda p: float(p.state == "serving")),
    ):
        family = kind(f"skipstone_{name}", about, labels=("module", "peer"))
        for peer in peers:
            family.add_metric((str(peer.module or "-")[:16], peer.peer[:64]), of(peer))
        yield family
