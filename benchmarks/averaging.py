"""What a round costs: a module's vector averaged among peers in processes of their own, on loopback.

Skipstone's peers run the real runner, round machine and transport with mutual TLS, and everything from the moment
when a round is due until every replica stands on the new anchor counts: agreement, snapshot, exchange, outer step,
digests, commit. Beside them, in turns so that other load on the machine meets all alike: torch.distributed's all-reduce
over gloo (no encryption, no agreement), hivemind's DecentralizedAverager (its all-reduce only; its matchmaking is done
before the clock starts), a bare one-way gRPC stream with mutual TLS, from whose rate follows what the transport alone
needs for the bytes of the round, and those bytes on bare streams among as many processes.

Prints one JSON object; what is under way goes to stderr. MB are 10**6 bytes; times are medians, of the slowest peer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.averaging_gloo import gloo_process
from benchmarks.averaging_hivemind import averager_process
from benchmarks.hop_hivemind import process_group
from node.runtime.malloc import keep_freed_memory

# In every process: each imports this module. What brings gRPC with it is imported later, as hivemind's processes fork.
keep_freed_memory()

ROUNDS = 5
WARM_UP_ROUNDS = 2
RIVALS = {"NONE": "NONE", "INT8": "FLOAT16"}
"""Our codecs, and the one of hivemind's that each is held against: the best that works in its averager."""
STREAM_MESSAGE_BYTES = 512 * 1024
STREAM_BATCH_BYTES = 128 * 1024 * 1024
PATIENCE_S = 120.0
START_PATIENCE_S = 30.0
STARTS = 4

Round = Callable[[], dict[str, Any] | None]
"""Holds one round: `seconds`, and `sent_bytes` where that is known. None when it failed."""


@dataclass
class Contender:
    """One of those compared, at one size and number of peers."""

    name: str
    hold: Round
    seconds: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    failed: int = 0

    def take_turn(self, counts: bool) -> None:
        outcome = self.hold()
        if not counts:
            return
        if outcome is None:
            self.failed += 1
            return
        self.seconds.append(outcome["seconds"])
        self.sent_bytes.append(outcome.get("sent_bytes", 0))

    @property
    def median_ms(self) -> float | None:
        return round(statistics.median(self.seconds) * 1e3, 1) if self.seconds else None


def hear(connection: Connection, patience_s: float = PATIENCE_S) -> Any:
    if not connection.poll(patience_s):
        raise TimeoutError(f"a measured process has said nothing for {patience_s:.0f} s")
    return connection.recv()


def spanned(times: list[tuple[float, float]]) -> float:
    """From the first beginning to the last end."""
    return max(end for _, end in times) - min(begin for begin, _ in times)


def all_in_step(peers: list[Connection]) -> list[Any]:
    """Has all prepare, then all go; what each has measured."""
    for word in ("prepare", "go"):
        for peer in peers:
            peer.send(word)
        heard = [hear(peer) for peer in peers]
    return heard


def introduce(peers: list[Connection]) -> None:
    """Each says how it is reached, and is told of all; returns when all are ready."""
    contacts = [hear(peer) for peer in peers]
    for peer in peers:
        peer.send(contacts)
    for peer in peers:
        hear(peer)


@contextmanager
def skipstone(codec: str, elements: int, count: int) -> Iterator[Round]:
    from benchmarks.averaging_skipstone import round_process
    from benchmarks.raw_stream import process

    with ExitStack() as processes:
        peers = [processes.enter_context(process(round_process, elements, codec)) for _ in range(count)]
        introduce(peers)

        def hold() -> dict[str, Any]:
            results = all_in_step(peers)
            versions = {version for _, _, version, _ in results}
            assert len(versions) == 1, f"the peers' anchors differ: {versions}"
            sent = sum(sent for _, _, _, sent in results)
            return {"seconds": spanned([(begin, end) for begin, end, _, _ in results]), "sent_bytes": sent}

        yield hold


@contextmanager
def gloo(elements: int, count: int) -> Iterator[Round]:
    from benchmarks.raw_stream import process

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        peers = [
            stack.enter_context(process(gloo_process, rank, count, elements, f"{folder}/store"))
            for rank in range(count)
        ]
        for peer in peers:
            hear(peer)
        yield lambda: {"seconds": spanned(all_in_step(peers))}


@contextmanager
def bare(codec: str, elements: int, count: int) -> Iterator[Round]:
    from benchmarks.averaging_bare import bare_process
    from benchmarks.raw_stream import process
    from protocol.codecs import encoded_bytes
    from swarm.vocabulary.types import Codec

    size = encoded_bytes(Codec[codec], elements)
    with ExitStack() as processes:
        peers = [processes.enter_context(process(bare_process, count, size)) for _ in range(count)]
        introduce(peers)
        yield lambda: {"seconds": spanned(all_in_step(peers))}


@contextmanager
def hivemind(codec: str, elements: int, count: int) -> Iterator[Round]:
    """Started again when it hangs at its start, as it does now and then; without one that starts, every round has
    failed."""
    for attempt in range(1, STARTS + 1):
        with ExitStack() as processes:
            try:
                peers = start_hivemind(processes, codec, elements, count)
            except (TimeoutError, EOFError):
                print(f"hivemind did not start, try {attempt} of {STARTS}", file=sys.stderr)
                continue
            yield partial(hivemind_round, peers)
            return
    yield lambda: None


def start_hivemind(processes: ExitStack, codec: str, elements: int, count: int) -> list[Connection]:
    """Raises TimeoutError when one is silent for too long."""
    peers: list[Connection] = []
    addresses: list[str] = []
    for _ in range(count):
        peers.append(processes.enter_context(process_group(averager_process, count, elements, codec, addresses)))
        addresses = hear(peers[-1], START_PATIENCE_S)
    return peers


def hivemind_round(peers: list[Connection]) -> dict[str, Any] | None:
    """After a round that hung the peers are not in step any more, and are taken out."""
    if not peers:
        return None
    try:
        times = all_in_step(peers)
    except (TimeoutError, EOFError, OSError):
        peers.clear()
        return None
    return None if None in times else {"seconds": spanned(times)}


def compare(megabytes: int, count: int, rounds: int, with_hivemind: bool) -> dict[str, Any]:
    """All contenders with float32, and then with 8 bits: not at once, or the largest size would need more than 24
    GB."""
    races = {codec: race(codec, megabytes, count, rounds, with_hivemind) for codec in RIVALS}
    return {
        "mb": megabytes,
        "peers": count,
        "transport_mb_per_s": round(statistics.median(rate for race in races.values() for rate in race.rates), 1),
        "gloo_ms": races["NONE"].gloo.median_ms,
        "skipstone": {codec.lower(): race.summary(codec, megabytes, count) for codec, race in races.items()},
        "hivemind_failed": [race.hivemind.failed for race in races.values() if race.hivemind is not None],
    }


@dataclass
class Race:
    """Those that were compared in turns, and the rates (MB/s) of the stream between them."""

    ours: Contender
    bare: Contender
    gloo: Contender
    hivemind: Contender | None
    rates: list[float] = field(default_factory=list)

    @property
    def contenders(self) -> list[Contender]:
        rival = [] if self.hivemind is None else [self.hivemind]
        return [self.ours, self.bare, self.gloo, *rival]

    def summary(self, codec: str, megabytes: int, count: int) -> dict[str, Any]:
        from protocol.codecs import encoded_bytes
        from swarm.vocabulary.types import Codec

        optimum = 2 * (count - 1) * encoded_bytes(Codec[codec], megabytes * 1_000_000 // 4)
        sent, milliseconds = statistics.median(self.ours.sent_bytes), self.ours.median_ms or 0.0
        transport_ms = sent / statistics.median(self.rates) / 1e3
        bare_ms, rival_ms = self.bare.median_ms, None if self.hivemind is None else self.hivemind.median_ms
        return {
            "ms": milliseconds,
            "sent_bytes": sent,
            "sent_over_optimum": round(sent / optimum, 4),
            "transport_ms": round(transport_ms, 1),
            "over_transport": round(milliseconds / transport_ms, 3),
            "bare_ms": bare_ms,
            "over_bare": round(milliseconds / bare_ms, 3) if bare_ms else None,
            "hivemind_ms": rival_ms,
            "speedup_over_hivemind": round(rival_ms / milliseconds, 2) if rival_ms else None,
        }


def race(codec: str, megabytes: int, count: int, rounds: int, with_hivemind: bool) -> Race:
    elements, rival = megabytes * 1_000_000 // 4, f"hivemind {RIVALS[codec]}"
    with ExitStack() as stack:
        found = Race(
            Contender(codec, stack.enter_context(skipstone(codec, elements, count))),
            Contender("bare", stack.enter_context(bare(codec, elements, count))),
            Contender("gloo", stack.enter_context(gloo(elements, count))),
            Contender(rival, stack.enter_context(hivemind(RIVALS[codec], elements, count))) if with_hivemind else None,
        )
        for number in range(-WARM_UP_ROUNDS, rounds):
            for contender in found.contenders:
                contender.take_turn(number >= 0)
            found.rates.append(stream_rate())
            figures = {contender.name: contender.median_ms for contender in found.contenders}
            print(
                f"{megabytes} MB, {count} peers: medians {figures} ms, stream {found.rates[-1]:.0f} MB/s",
                file=sys.stderr,
            )
    return found


def stream_rate() -> float:
    from benchmarks.raw_stream import raw_mb_per_s

    return raw_mb_per_s(STREAM_MESSAGE_BYTES, batch_bytes=STREAM_BATCH_BYTES, repeats=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rounds of averaging among processes on loopback.")
    parser.add_argument("--mb", type=int, nargs="+", default=[4, 40, 200], help="float32 MB of the module")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted rounds of each (default 5)")
    parser.add_argument("--without-hivemind", action="store_true")
    options = parser.parse_args()
    results = [
        compare(megabytes, count, options.rounds, not options.without_hivemind)
        for megabytes in options.mb
        for count in options.peers
    ]
    fixed = [r["skipstone"]["none"]["ms"] for r in results if (r["mb"], r["peers"]) == (4, 4)]
    print(json.dumps({"rounds": options.rounds, "results": results, "fixed_cost_ms": fixed[0] if fixed else None}))


if __name__ == "__main__":
    main()
