"""The network at a moment: delays and rates add up over both links, faults and partitions stop what they should."""

import asyncio
import contextlib
import heapq
import itertools
import os
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from lab.emulation import emulation as links
from lab.emulation import proxy
from node.concurrency.task_groups import task_scope

SLOW = links.LinkShape(latency_s=0.01, up_bytes_per_s=1000.0, down_bytes_per_s=4000.0)
FAR = links.LinkShape(latency_s=0.05, up_bytes_per_s=8000.0, down_bytes_per_s=2000.0)


def emulation(*shapes: links.LinkShape) -> links.Emulation:
    made = links.Emulation(seed=1)
    for member, shape in enumerate(shapes):
        made.place(member, links.Site(shape))
    return made


def test_both_links_delay_and_limit_and_that_of_no_member_is_ideal() -> None:
    network = emulation(SLOW, FAR)
    assert network.one_way_s((0, 1), random.Random(0)) == pytest.approx(0.06)
    left_at = network.leave((0, 1), 1000, 0.0)
    assert left_at == pytest.approx(1.0 - links.BURST_S)
    assert network.arrive((0, 1), 1000, left_at) == pytest.approx(left_at + 0.5 - links.BURST_S)
    assert network.passed() == {(0, 1): 1000}
    network = emulation(FAR)
    assert network.one_way_s((None, 0), random.Random(0)) == 0.05
    assert network.leave((None, 0), 10**9, 7.0) == 7.0


def test_jitter_is_drawn_anew_for_each_connection_and_the_same_with_the_same_seed() -> None:
    shapes = links.LinkShape(jitter_s=0.02), links.LinkShape(jitter_s=0.02)

    def draws(network: links.Emulation) -> list[float]:
        return [network.one_way_s((0, 1), network.randomness((0, 1))) for _ in range(3)]

    drawn = draws(emulation(*shapes))
    assert draws(emulation(*shapes)) == drawn
    assert len(set(drawn)) == 3
    assert all(0 <= delay <= 0.04 for delay in drawn)


def test_a_partition_parts_its_sides_and_nobody_else() -> None:
    network = emulation(*(links.LinkShape() for _ in range(4)))
    network.partition(((0, 1), (2,)))
    passing = {(one, other) for one in range(4) for other in range(4) if one < other and network.passes((one, other))}
    assert passing == {(0, 1), (0, 3), (1, 3), (2, 3)}
    network.heal()
    assert network.passes((0, 2))


async def test_who_waits_for_a_way_goes_on_when_it_is_open() -> None:
    network = emulation(links.LinkShape(fault=links.Fault.BLACK_HOLE), links.LinkShape())
    waiting = asyncio.create_task(network.passable((0, 1)))
    network.place(0, links.Site(links.LinkShape(latency_s=1.0, fault=links.Fault.HALF_OPEN)))
    await waiting
    network.place(0, links.Site(links.LinkShape(fault=links.Fault.BLACK_HOLE)))
    waiting = asyncio.create_task(network.passable((0, 1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    network.clear()
    await waiting


def test_regions_add_their_delay_and_rate_and_their_tables_are_symmetric_and_whole() -> None:
    network = links.Emulation(seed=1)
    network.place(0, links.profile_of("gcp-london").site)
    network.place(1, links.profile_of("gcp-oregon").site)
    network.place(2, links.Site())
    assert network.one_way_s((0, 1), random.Random(0)) == pytest.approx(0.064)
    assert network.one_way_s((0, 2), random.Random(0)) == 0.0
    size_bytes = 10 * 2**20
    assert network.leave((0, 1), size_bytes, 0.0) == pytest.approx(size_bytes / (21.75 * 2**20) - links.BURST_S)
    assert network.leave((0, 2), size_bytes, 0.0) == 0.0
    for one in links.REGIONS:
        for other in links.REGIONS:
            assert links.region_delay_s(one, other) == links.region_delay_s(other, one) > 0
            assert links.region_bytes_per_s(one, other) == links.region_bytes_per_s(other, one) > 2**20
    assert links.region_delay_s("belgium", "nl") == 0.003
    assert links.region_bytes_per_s("iowa", "oregon") == 92.5 * 2**20


def test_a_connection_breaks_behind_every_so_many_bytes() -> None:
    network = emulation(SLOW, FAR, FAR)
    network.break_every(1, 100)
    assert network.before_break((0, 2), 1000) is None
    assert network.before_break((0, 1), 60) is None
    assert network.before_break((2, 1), 50) == 40, "all connections to the peer count together"
    assert network.before_break((0, 1), 99) is None, "counted anew"
    assert network.before_break((0, 1), 1) == 1
    network.break_every(1, None)
    assert network.before_break((0, 1), 1000) is None


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 100_000)), min_size=1, max_size=50), st.floats(100, 1e6))
def test_no_more_passes_than_the_rate_and_one_burst(sends: list[tuple[float, int]], rate: float) -> None:
    shaper = links.Shaper(rate)
    now, left_at, passed = 0.0, 0.0, 0
    for pause_s, size_bytes in sends:
        now = max(now + pause_s, left_at)
        granted = shaper.grant(size_bytes, now)
        assert granted >= max(now, left_at)
        left_at, passed = granted, passed + size_bytes
    assert passed <= (left_at + links.BURST_S) * rate * (1 + 1e-9) + 1


def test_a_new_rate_holds_for_what_comes_after_it_and_a_pause_saves_nothing_up() -> None:
    shaper = links.Shaper(1000.0)
    assert shaper.grant(1000, 0.0) == pytest.approx(1.0 - links.BURST_S)
    shaper.bytes_per_s = 100.0
    assert shaper.grant(100, 0.0) == pytest.approx(2.0 - links.BURST_S)
    assert shaper.grant(100, 5.0) == pytest.approx(6.0 - links.BURST_S)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads /proc")

NODE, CALLER = 0, 1
AT_ONCE = struct.pack("ii", 1, 0)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_numbers = itertools.count(1)


class Stage:
    def __init__(self, emulation: links.Emulation, server: asyncio.Server, outside: proxy.Endpoint) -> None:
        self.emulation = emulation
        self.server = server
        self.outside = outside

    @asynccontextmanager
    async def call(self) -> AsyncIterator[Streams]:
        reader, writer = await asyncio.open_connection(*self.outside)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@asynccontextmanager
async def stage(serve: Serve, node: links.LinkShape, caller: links.LinkShape) -> AsyncIterator[Stage]:
    emulation = links.Emulation(seed=7)
    emulation.place(NODE, links.Site(node))
    emulation.place(CALLER, links.Site(caller))
    number = next(_numbers)

    async def find_caller(source: proxy.Endpoint, target: proxy.Endpoint) -> int:
        return CALLER

    async def serve_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve_and_close, f"127.77.251.{number}", 0)
    port = server.sockets[0].getsockname()[1]
    proxied = proxy.ProxiedPort(NODE, (f"127.78.251.{number}", port), (f"127.77.251.{number}", port))
    watch = proxy.ListenWatch()
    async with task_scope() as tasks:
        forwarding = proxy.Proxy(proxied, emulation, find_caller).run(watch)
        running = [tasks.create_task(each) for each in (watch.run(), forwarding)]
        await until_open(proxied.outside)
        try:
            yield Stage(emulation, server, proxied.outside)
        finally:
            for task in running:
                task.cancel()
            server.close()
            await server.wait_closed()


async def until_open(endpoint: proxy.Endpoint, *, is_open: bool = True) -> None:
    """Looks without calling, which would count as traffic."""
    while (endpoint in proxy.listening()) != is_open:
        await asyncio.sleep(0.02)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"the end")
    writer.close()


IDEAL = links.LinkShape()


async def test_bytes_keep_their_order_and_number_under_jitter() -> None:
    jittery = links.LinkShape(latency_s=0.002, jitter_s=0.02, up_bytes_per_s=5e6, down_bytes_per_s=5e6)
    sent = os.urandom(300_000)
    async with stage(echo, jittery, jittery) as at, at.call() as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await reader.read(-1) == sent + b"the end"
        passed = at.emulation.passed()
    assert passed[CALLER, NODE] == len(sent)
    assert passed[NODE, CALLER] == len(sent) + len(b"the end")


async def test_a_reset_is_seen_at_both_ends_and_new_calls_are_refused() -> None:
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(100):
                writer.write(b"here")
        except OSError as error:
            if not ended.done():
                ended.set_result(error)

    async with stage(serve, IDEAL, IDEAL) as at, at.call() as (reader, writer):
        writer.write(b"there")
        assert await reader.readexactly(4) == b"here"
        at.emulation.place(NODE, links.Site(links.LinkShape(fault=links.Fault.RESET)))
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        assert isinstance(await ended, ConnectionResetError)
        await until_open(at.outside, is_open=False)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*at.outside)
        at.emulation.clear()
        await until_open(at.outside)


async def test_a_connection_is_reset_in_the_middle_of_what_it_carries_and_a_new_one_is_not() -> None:
    got = bytearray()
    broken = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(100):
                got.extend(data)
                writer.write(data)
        except OSError:
            broken.set()

    async with stage(serve, IDEAL, IDEAL) as at:
        at.emulation.break_every(NODE, 1000)
        async with at.call() as (reader, writer):
            writer.write(bytes(1500))
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)) as ended:
                await reader.readexactly(1500)
            assert ended.type is ConnectionResetError
        await broken.wait()
        assert len(got) <= 1000, "a reset may overtake what came just before it"
        got.clear()
        async with at.call() as (reader, writer):
            writer.write(bytes(999))
            writer.write_eof()
            assert len(await reader.read(-1)) == 999


async def test_a_broken_connection_is_broken_for_the_other_side_too() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        writer.transport.abort()

    async with stage(serve, IDEAL, IDEAL) as at, at.call() as (reader, writer):
        writer.write(b"bye!")
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_callers_that_break_off_at_once_harm_nobody() -> None:
    async with stage(echo, IDEAL, IDEAL) as at:
        for _ in range(20):
            hasty = socket.create_connection(at.outside)  # all of it before the proxy's turn
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            hasty.close()
        async with at.call() as (reader, writer):
            writer.write_eof()
            assert await reader.read(-1) == b"the end"


async def test_a_black_hole_delivers_nothing_and_tells_nobody_until_it_is_gone() -> None:
    async with stage(echo, IDEAL, IDEAL) as at, at.call() as (reader, writer):
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        at.emulation.place(NODE, links.Site(links.LinkShape(fault=links.Fault.BLACK_HOLE)))
        writer.write(b"within")
        async with at.call():  # it is accepted, as by a machine whose cable was cut just now
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await reader.read(1)
        at.emulation.clear()
        assert await reader.readexactly(6) == b"within"


async def test_what_cannot_be_delivered_is_not_read_without_end() -> None:
    unread = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await unread.wait()

    async with stage(serve, IDEAL, IDEAL) as at, at.call() as (_, writer):
        at.emulation.place(NODE, links.Site(links.LinkShape(latency_s=30.0)))
        written = 0
        with contextlib.suppress(TimeoutError):
            while written < 2**30:
                writer.write(bytes(2**20))
                written += 2**20
                async with asyncio.timeout(1.0):
                    await writer.drain()
        assert written < 4 * proxy.MAX_HELD_BYTES + 64 * 2**20, "held by the proxy and the kernel's buffers"
        writer.transport.abort()
        unread.set()


@pytest.mark.parametrize(
    "check",
    [
        test_bytes_keep_their_order_and_number_under_jitter,
        test_a_reset_is_seen_at_both_ends_and_new_calls_are_refused,
        test_a_broken_connection_is_broken_for_the_other_side_too,
        test_callers_that_break_off_at_once_harm_nobody,
        test_what_cannot_be_delivered_is_not_read_without_end,
    ],
)
def test_it_is_the_same_on_uvloop(check: Callable[[], Coroutine[None, None, None]]) -> None:
    """The command runs on it, and its transports raise other things when they are closed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(check())


async def test_the_caller_is_found_by_its_socket() -> None:
    server = await asyncio.start_server(echo, "127.77.252.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    script = (
        f"import socket, sys; s = socket.create_connection(('{host}', {port})); print(s.getsockname()[1], "
        "flush=True); sys.stdin.read()"
    )
    # A shell in between: what a node has started counts as the node.
    child = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        f'{sys.executable} -c "{script}"; true',
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    source = ("127.0.0.1", int(await child.stdout.readline()))
    assert await asyncio.to_thread(proxy.Callers(lambda: {5: child.pid}).caller, source, (host, port)) == 5
    assert await asyncio.to_thread(proxy.Callers(dict).caller, source, (host, port)) is None
    assert {root for root, _ in proxy.descendants({child.pid})} == {child.pid}
    await child.communicate(b"")
    server.close()
    await server.wait_closed()


def test_the_kernels_table_is_read() -> None:
    rest = "00000000:00000000 00:00000000 00000000     0        0 2596514 1 0000000000000000 100 0 0 10 0"
    plain = proxy.parse_socket(f"   0: 0100007F:96A9 00000000:0000 0A {rest}")
    assert (plain.local, plain.listens, plain.inode) == (("127.0.0.1", 0x96A9), True, 2596514)
    ends = "0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000200007F:0050"
    mapped = proxy.parse_socket(f"   0: {ends} 01 {rest}")
    assert (mapped.local, mapped.remote, mapped.listens) == (("127.0.0.1", 8080), ("127.0.0.2", 80), False)


SENDER, RECEIVER = 0, 1
RATE = 1_000_000.0
DELAY_S = 0.1


class LateClock:
    """Virtual time, in which every sleep lasts longer than asked."""

    def __init__(self, late_s: float) -> None:
        self.now = 0.0
        self._late_s = late_s
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._numbers = itertools.count()

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now + seconds + self._late_s, next(self._numbers), woken))
        await woken.wait()

    async def run(self) -> None:
        while True:
            for _ in range(10):  # whoever can go on does so first
                await asyncio.sleep(0)
            if self._sleepers:
                self.now, _, woken = heapq.heappop(self._sleepers)
                woken.set()


class Receiver:
    def __init__(self, clock: LateClock) -> None:
        self._clock = clock
        self.arrivals: list[tuple[float, int]] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.arrivals.append((self._clock.now, len(data)))

    async def drain(self) -> None:
        return

    def write_eof(self) -> None:
        return


async def carried(size_bytes: int, late_s: float, *, down: float = RATE, later: float | None = None) -> Receiver:
    emulation, clock = links.Emulation(seed=1), LateClock(late_s)
    emulation.place(SENDER, links.Site(links.LinkShape(latency_s=DELAY_S, up_bytes_per_s=RATE)))
    emulation.place(RECEIVER, links.Site(links.LinkShape(down_bytes_per_s=down)))
    reader, receiver = asyncio.StreamReader(), Receiver(clock)
    writer: Any = receiver
    reader.feed_data(bytes(size_bytes))
    ticking = asyncio.create_task(clock.run())
    pipe = proxy.Pipe(emulation, (SENDER, RECEIVER), reader, writer, lambda: clock.now, clock.sleep)
    running = asyncio.create_task(pipe.run())
    if later is not None:
        await clock.sleep(later)
        reader.feed_data(b"x")
    reader.feed_eof()
    await running
    ticking.cancel()
    assert sum(size for _, size in receiver.arrivals) == size_bytes + (later is not None)
    return receiver


@pytest.mark.parametrize("late_s", [0.0, 0.004, 0.03])
@pytest.mark.parametrize("down", [RATE, RATE / 2])
async def test_a_busy_machine_does_not_make_the_link_narrower(late_s: float, down: float) -> None:
    """Where each piece began when the process woke, half a megabyte took 3.6 s for 1.1, thirty milliseconds late."""
    size_bytes = 500_000
    last, _ = (await carried(size_bytes, late_s, down=down)).arrivals[-1]
    ideal_s = size_bytes / min(RATE, down) + DELAY_S
    assert ideal_s * 0.97 <= last <= ideal_s + 3 * late_s + 0.01


@pytest.mark.parametrize("late_s", [0.0, 0.03])
async def test_nothing_comes_sooner_than_the_link_allows(late_s: float) -> None:
    passed = 0
    for at, size in (await carried(200_000, late_s)).arrivals:
        passed += size
        assert at >= DELAY_S + passed / RATE - 0.01 - 1e-9, "its burst apart"


async def test_what_is_sent_later_is_not_taken_for_sent_when_the_process_overslept() -> None:
    at, size = (await carried(100_000, 0.03, later=2.0)).arrivals[-1]
    assert size == 1
    assert at >= 2.0 + DELAY_S
