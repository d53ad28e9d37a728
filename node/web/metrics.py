"""The state of a run as Prometheus reads it, in base units."""

from collections.abc import Iterator
from typing import Any

from node.observability.status import PeerStatus, SwarmStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics(status: SwarmStatus, own: tuple[str, ...]) -> bytes:
    """Returns the text of a scrape: the run, and the peers of this node; for a visitor, all peers."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status, own))
    return generate_latest(registry)


class _Collector:
    def __init__(self, status: SwarmStatus, own: tuple[str, ...]) -> None:
        self._status = status
        self._peers = [peer for peer in status.peers if peer.answered is not None and (not own or peer.peer in own)]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        run = self._status
        for name, about, value in (
            ("loss", "Training loss in nats per token", run.loss),
            ("step", "Steps of the foremost data node", run.step),
            ("run_tokens_per_second", "Tokens that the run trains on per second", run.tokens_per_s),
            ("peers", "Peers that host a module", sum(peer.module is not None for peer in run.peers)),
            ("modules_without_peer", "Modules that no peer serves", len(run.waiting_for)),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"skipstone_{name}", about, value=value)
        for kind, name, about, of in (
            (CounterMetricFamily, "tokens", "Tokens in accumulated microbatches", lambda s: s.tokens),
            (CounterMetricFamily, "inner_steps", "Inner steps", lambda s: s.steps),
            (CounterMetricFamily, "microbatches", "Gradients added", lambda s: s.accumulated),
            (CounterMetricFamily, "rounds", "Averaging rounds", lambda s: s.round),
            (CounterMetricFamily, "busy_seconds", "Time in which the device computed", lambda s: s.compute.busy_s),
            (GaugeMetricFamily, "tokens_per_second", "Tokens per second", lambda s: s.tokens_per_s),
            (GaugeMetricFamily, "slots", "Slots for microbatches", lambda s: s.slots),
            (GaugeMetricFamily, "free_slots", "Free slots", lambda s: s.free_slots),
            (GaugeMetricFamily, "serving", "1 while the module is served", lambda s: float(s.state == "serving")),
        ):
            family = kind(f"skipstone_{name}", about, labels=("module", "peer"))
            for peer in self._peers:
                if peer.said.compute is not None or name != "busy_seconds":
                    family.add_metric(_labels(peer), of(peer.said))
            yield family
        links = CounterMetricFamily("skipstone_link_bytes", "Bytes on links", labels=("module", "peer", "way"))
        for peer in self._peers:
            for way in ("sent", "received"):
                moved = sum(getattr(each, f"{way}_bytes") for each in (peer.said.traffic or {}).values())
                links.add_metric((*_labels(peer), way), moved)
        yield links


def _labels(peer: PeerStatus) -> tuple[str, str]:
    return str(peer.module or "-")[:16], peer.peer[:64]
