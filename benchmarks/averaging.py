"""What a round costs: a module's vector averaged among peers in processes of their own, on loopback.

Skipstone's peers (`benchmarks.round_peer`) hold real rounds over mutual TLS, from agreement to commit. Beside them, in
turns: torch.distributed's all-reduce over gloo (no encryption, no agreement), hivemind's DecentralizedAverager
(matchmaking is done before the clock starts), the bytes of a round on bare gRPC streams among as many processes, and
the rate of one such stream. Times are medians, of the slowest peer. MB are 10**6 bytes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import RUN, hear, introduce, process, rounded, tell
from node.runtime.malloc import keep_freed_memory

# In every process: each imports this module. gRPC is imported in functions only, because hivemind's processes fork.
keep_freed_memory()

WARM_UP_ROUNDS: Final = 2
RIVALS: Final = {"NONE": "NONE", "INT8": "FLOAT16"}
"""Our codecs, and hivemind's codec for each: the best that works in its averager."""
MESSAGE_BYTES: Final = 512 * 1024
START_PATIENCE_S: Final = 30.0
STARTS: Final = 4
MATCHMAKING_S: Final = 3.0
HIVEMIND_S: Final = 60.0
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
        if counts and outcome is None:
            self.failed += 1
        elif counts and outcome is not None:
            self.seconds.append(outcome["seconds"])
            self.sent_bytes.append(outcome.get("sent_bytes", 0))

    @property
    def median_ms(self) -> float | None:
        return round(statistics.median(self.seconds) * 1e3, 1) if self.seconds else None


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


# ---- ours ------------------------------------------------------------------------------------------------------------


@contextmanager
def skipstone(codec: str, elements: int, count: int) -> Iterator[Round]:
    from benchmarks.round_peer import round_process

    with ExitStack() as processes:
        peers = [processes.enter_context(process(round_process, elements, codec)) for _ in range(count)]
        introduce(peers)

        def hold() -> dict[str, Any]:
            results = all_in_step(peers)
            versions = {version for _, _, version, _ in results}
            assert len(versions) == 1, f"the peers' anchors differ: {versions}"
            times = [(begin, end) for begin, end, _, _ in results]
            return {"seconds": spanned(times), "sent_bytes": sum(sent for _, _, _, sent in results)}

        yield hold


# ---- bare streams ----------------------------------------------------------------------------------------------------


@contextmanager
def bare(size_bytes: int, count: int) -> Iterator[Round]:
    with ExitStack() as processes:
        peers = [processes.enter_context(process(bare_process, count, size_bytes)) for _ in range(count)]
        introduce(peers)
        yield lambda: {"seconds": spanned(all_in_step(peers))}


def bare_process(connection: Connection, count: int, size_bytes: int) -> None:
    """One of `count` processes; sends every other its share of a round of so many encoded bytes, as zeros."""
    import uvloop

    from benchmarks.transport import END_OF_BATCH, LONGEST_MESSAGE, dialled, echo_batches
    from protocol.identity.certificates import make_credentials
    from protocol.identity.keys import Identity
    from protocol.interfaces.transport import Contact
    from protocol.transport.grpc_streams import DialledStream, make_server

    identity = Identity.generate()
    credentials = make_credentials(identity, RUN)

    async def send(stream: DialledStream, size: int) -> None:
        message = bytes(MESSAGE_BYTES)
        for start in range(0, size, MESSAGE_BYTES):
            await stream.write(message[: size - start])
        await stream.write(END_OF_BATCH)
        await stream.read()

    async def main() -> None:
        server, port = make_server(echo_batches, credentials, "127.0.0.1:0", count, max_frame_bytes=LONGEST_MESSAGE)
        await server.start()
        connection.send(Contact(identity.peer, (f"127.0.0.1:{port}",), credentials.certificate_der))
        contacts: list[Contact] = await asyncio.to_thread(connection.recv)
        streams = [dialled(contact, credentials) for contact in contacts if contact.peer != identity.peer]
        for stream in streams:
            await send(stream, 0)
        connection.send("ready")
        while await asyncio.to_thread(connection.recv):
            connection.send("prepared")
            await asyncio.to_thread(connection.recv)
            begun = time.monotonic()
            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(send(stream, 2 * size_bytes // count))
            connection.send((begun, time.monotonic()))

    uvloop.run(main())


# ---- gloo ------------------------------------------------------------------------------------------------------------


@contextmanager
def gloo(elements: int, count: int) -> Iterator[Round]:
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory()) + "/store"
        peers = [stack.enter_context(process(gloo_process, rank, count, elements, store)) for rank in range(count)]
        for peer in peers:
            hear(peer)
        yield lambda: {"seconds": spanned(all_in_step(peers))}


def gloo_process(connection: Connection, rank: int, count: int, elements: int, store: str) -> None:
    """One of `count` processes that sum a vector; a round for each message."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=patience)
    values = torch.full((elements,), float(rank))
    connection.send("ready")
    while connection.recv():
        values.fill_(float(rank))
        connection.send("prepared")
        connection.recv()
        begun = time.monotonic()
        dist.all_reduce(values)
        connection.send((begun, time.monotonic()))
        assert values[-1].item() == sum(range(count))


# ---- hivemind --------------------------------------------------------------------------------------------------------


@contextmanager
def hivemind(codec: str, elements: int, count: int) -> Iterator[Round]:
    """Started again when it hangs at its start, as it does now and then; else every round counts as failed."""
    for attempt in range(1, STARTS + 1):
        with ExitStack() as processes:
            peers, addresses = list[Connection](), list[str]()
            try:
                for _ in range(count):
                    peer = process(averager_process, count, elements, codec, addresses, grace_s=10.0)
                    peers.append(processes.enter_context(peer))
                    addresses = hear(peers[-1], START_PATIENCE_S)
            except (TimeoutError, EOFError):
                tell(f"hivemind did not start, try {attempt} of {STARTS}")
                continue
            yield partial(hivemind_round, peers)
            return
    yield lambda: None


def hivemind_round(peers: list[Connection]) -> dict[str, Any] | None:
    """After a round that hung the peers are not in step any more, and are taken out."""
    try:
        times = all_in_step(peers) if peers else [None]
    except (TimeoutError, EOFError, OSError):
        peers.clear()
        return None
    return None if None in times else {"seconds": spanned(times)}


def averager_process(connection: Connection, count: int, elements: int, codec: str, peers: list[str]) -> None:
    """One of `count` averagers, in float32 or half precision (with NumPy 2.4 its 8-bit codecs fail)."""
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import Float16Compression, NoCompression
    from hivemind.dht import DHT

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # its averager is a process that cannot be started otherwise
    dht = DHT(initial_peers=peers, start=True)
    averager = DecentralizedAverager(
        [torch.randn(elements)],
        dht,
        prefix="bench",
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=1.0,
        compression=Float16Compression() if codec == "FLOAT16" else NoCompression(),
        start=True,
    )
    connection.send([str(address) for address in dht.get_visible_maddrs()])
    try:
        while connection.recv():
            control = averager.step(wait=False, require_trigger=True, timeout=HIVEMIND_S)
            connection.send(is_matched(control))
            connection.recv()
            connection.send(all_reduced(control))
    finally:
        averager.shutdown()
        dht.shutdown()


def is_matched(control: Any) -> bool:
    """Waits until the group has been found."""
    from hivemind.averaging.control import AveragingStage

    deadline = time.monotonic() + HIVEMIND_S
    while control.stage != AveragingStage.AWAITING_TRIGGER:
        if control.done() or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def all_reduced(control: Any) -> tuple[float, float] | None:
    begun = time.monotonic()
    try:
        control.allow_allreduce()
        control.result(HIVEMIND_S)
    except Exception as error:
        tell(f"hivemind: a round failed: {error!r:.200}")
        return None
    return begun, time.monotonic()


# ---- all -------------------------------------------------------------------------------------------------------------


def race(codec: str, megabytes: float, count: int, options: Any) -> dict[str, Any]:
    """All contenders in turns, for one of our codecs."""
    from benchmarks.transport import bare_stream
    from protocol.codecs import encoded_bytes
    from swarm.vocabulary.types import Codec

    elements = int(megabytes * 250_000)
    size, rates = encoded_bytes(Codec[codec], elements), list[float]()
    with ExitStack() as stack:
        arms = {"ours": skipstone(codec, elements, count), "bare": bare(size, count), "gloo": gloo(elements, count)}
        if not options.without_hivemind:
            arms["hivemind"] = hivemind(RIVALS[codec], elements, count)
        found = {name: Contender(name, stack.enter_context(arm)) for name, arm in arms.items()}
        stream_rate = stack.enter_context(bare_stream(128 * 2**20))
        for number in range(-WARM_UP_ROUNDS, options.rounds):
            for contender in found.values():
                contender.take_turn(number >= 0)
            rates.append(stream_rate(MESSAGE_BYTES))
            shown = {name: contender.median_ms for name, contender in found.items()}
            tell(f"{megabytes} MB, {count} peers, {codec}: {shown} ms, stream {rates[-1]:.0f} MB/s")
    sent, ours_ms = statistics.median(found["ours"].sent_bytes), found["ours"].median_ms or 0.0
    rate = statistics.median(rates)
    rival = found.get("hivemind")
    rival_ms = rival.median_ms if rival else None
    bare_ms = found["bare"].median_ms
    return {
        "ms": ours_ms,
        "sent_bytes": sent,
        "sent_over_optimum": round(sent / (2 * (count - 1) * size), 4),
        "stream_mb_per_s": round(rate, 1),
        "over_transport": round(ours_ms * rate * 1e3 / sent, 3),
        "bare_ms": bare_ms,
        "over_bare": rounded(ours_ms / bare_ms if bare_ms else None),
        "gloo_ms": found["gloo"].median_ms,
        "hivemind_ms": rival_ms,
        "hivemind_failed": rival.failed if rival else None,
        "speedup_over_hivemind": rounded(rival_ms / ours_ms if rival_ms else None, 2),
    }


def measure(options: Any) -> dict[str, Any]:
    """One codec after the other: all contenders of both need more than 24 GB at the largest size."""
    results = [
        {"mb": megabytes, "peers": count, **{codec.lower(): race(codec, megabytes, count, options) for codec in RIVALS}}
        for megabytes in options.mb
        for count in options.peers
    ]
    return {"rounds": options.rounds, "results": results}


def main() -> None:
    quick = {"mb": [0.4], "peers": [2], "rounds": 1, "without_hivemind": True}
    kit.run(__doc__, measure, quick, mb=[4.0, 40.0, 200.0], peers=[2, 4], rounds=5, without_hivemind=False)


if __name__ == "__main__":
    main()
