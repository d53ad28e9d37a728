"""The order in which a link sends, and what bounds what it holds."""

import asyncio

import pytest

from protocol.frames import frames as transfers
from protocol.frames.frames import MAX_SMALL_FRAME_BYTES, Cancel, Chunk, OutgoingTransfer, decode
from protocol.transport import rate_limits as limits
from protocol.transport.link import MAX_WAITING_BYTES, MOST_ON_THE_WAY, ByteBudget, Goodput, Meter, Outbox, TrafficClass
from protocol.transport.settings import TransportSettings
from swarm.vocabulary.errors import Stalled, Unreachable
from tests.kit.waiting import ManualClock
from tests.protocol.transport.link_peers import committed_bytes

CHUNK = 4096
ERROR = Unreachable("over")


class Wire:
    """A stream that takes a frame only when the test lets it."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.gate = asyncio.Semaphore(0)
        self.grown = asyncio.Condition()

    async def write(self, frame: bytes) -> None:
        await self.gate.acquire()
        async with self.grown:
            self.frames.append(frame)
            self.grown.notify_all()

    async def let(self, frames: int) -> None:
        wanted = len(self.frames) + frames
        for _ in range(frames):
            self.gate.release()
        async with asyncio.timeout(10), self.grown:
            await self.grown.wait_for(lambda: len(self.frames) >= wanted)

    def story(self) -> list[str]:
        """Headers and small frames as they are, chunks as `transfer.index`."""
        return [_name(frame) for frame in self.frames]


def _name(frame: bytes) -> str:
    if frame[:1] != b"\x12":
        return frame.decode()
    chunk = decode(frame)
    assert isinstance(chunk, Chunk)
    return f"{chunk.transfer}.{chunk.index}"


def outbox(budget_bytes: int = 10**9, places: int = 10) -> Outbox:
    return Outbox({traffic_class: ByteBudget(budget_bytes, places) for traffic_class in TrafficClass})


def sending(
    box: Outbox, number: int, chunks: int, traffic_class: TrafficClass = TrafficClass.MICROBATCHES
) -> asyncio.Task[bool]:
    data = memoryview(bytes(chunks * CHUNK))

    def make() -> OutgoingTransfer:
        return OutgoingTransfer(number, b"h%d" % number, data, CHUNK)

    return asyncio.create_task(box.send(traffic_class, len(data), make))


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_transfers_take_turns_and_small_frames_go_first() -> None:
    box, wire = outbox(), Wire()
    sends = [sending(box, 1, 3), sending(box, 2, 1)]
    await settled()
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(3)
    box.post(b"small")
    await wire.let(4)
    assert wire.story() == ["h1", "h2", "1.0", "2.0", "small", "1.1", "1.2"]
    assert await asyncio.gather(*sends) == [True, True]
    box.finish(b"farewell", ERROR)
    await wire.let(1)
    await pump
    assert (wire.story()[-1], committed_bytes(box)) == ("farewell", 0)


async def test_the_budget_holds_later_transfers_back_in_order() -> None:
    box, wire = outbox(budget_bytes=4 * CHUNK), Wire()
    sends = [sending(box, 1, 3), sending(box, 2, 2), sending(box, 3, 1)]
    pump = asyncio.create_task(box.pump(wire.write))
    await settled()
    assert committed_bytes(box) == 3 * CHUNK
    await wire.let(7)
    await settled()
    assert wire.story()[:4] == ["h1", "1.0", "1.1", "1.2"]
    assert sends[0].done()
    await wire.let(2)
    await asyncio.gather(*sends)
    pump.cancel()


async def test_lanes_take_turns_however_many_transfers_they_have() -> None:
    box, wire = outbox(), Wire()
    sends = [sending(box, number, 2, TrafficClass.BULK) for number in (2, 4, 6)] + [sending(box, 1, 4)]
    await settled()
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(3 * 3 + 5)
    assert await asyncio.gather(*sends) == [True] * 4
    assert wire.story()[:8] == ["h1", "h2", "1.0", "h4", "1.1", "h6", "1.2", "2.0"]
    assert wire.story()[8:] == ["1.3", "4.0", "6.0", "2.1", "4.1", "6.1"]
    pump.cancel()


async def test_a_lane_that_waits_for_its_budget_holds_the_other_up_for_nothing() -> None:
    box, wire = outbox(places=1), Wire()
    bulk = [sending(box, number, 50, TrafficClass.BULK) for number in (2, 4)]
    await settled()
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(10)
    microbatch = sending(box, 1, 1)
    await settled()
    await wire.let(5)
    assert await microbatch
    assert not any(task.done() for task in bulk)
    pump.cancel()
    box.finish(None, ERROR)
    assert await asyncio.gather(*bulk, return_exceptions=True) == [ERROR, ERROR]


async def test_what_is_larger_than_the_budget_goes_alone() -> None:
    box, wire = outbox(budget_bytes=CHUNK), Wire()
    first, large, last = sending(box, 1, 1), sending(box, 2, 5), sending(box, 3, 1)
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(2 + 6 + 2)
    assert await asyncio.gather(first, large, last) == [True, True, True]
    assert wire.story()[2:8] == ["h2", "2.0", "2.1", "2.2", "2.3", "2.4"]
    pump.cancel()


async def test_a_cancelled_waiter_gives_its_turn_on() -> None:
    box, wire = outbox(places=1), Wire()
    first, second, third = (sending(box, n, 1) for n in (1, 2, 3))
    pump = asyncio.create_task(box.pump(wire.write))
    await settled()
    assert committed_bytes(box) == CHUNK
    second.cancel()
    await wire.let(4)
    assert await asyncio.gather(first, third) == [True, True]
    assert wire.story() == ["h1", "1.0", "h3", "3.0"]
    pump.cancel()


async def test_a_waiter_cancelled_at_the_moment_of_its_turn_gives_it_back() -> None:
    budget = ByteBudget(10, 1)
    held, waits = asyncio.Event(), asyncio.Event()

    async def hold(until: asyncio.Event) -> None:
        async with budget.share(5):
            await until.wait()

    first, second = asyncio.create_task(hold(held)), asyncio.create_task(hold(waits))
    await settled()
    held.set()
    await first  # its end grants the second's turn, which has not run yet
    second.cancel()
    await asyncio.wait((second,))
    assert budget.used_bytes == 0
    waits.set()
    await hold(waits)


async def test_cancelling_before_the_header_went_out_says_nothing() -> None:
    box, wire = outbox(), Wire()
    task = sending(box, 1, 1)
    await settled()
    task.cancel()
    await settled()
    box.finish(b"farewell", ERROR)
    wire.gate.release()
    await box.pump(wire.write)
    assert wire.story() == ["farewell"]


@pytest.mark.parametrize("by_receiver", [True, False])
async def test_ending_a_transfer_in_the_middle_tells_the_receiver(by_receiver: bool) -> None:
    box, wire = outbox(), Wire()
    task = sending(box, 1, 3)
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(2)
    await settled()
    if by_receiver:
        box.stop(1)
        assert await task is False
    else:
        task.cancel()
        await asyncio.wait((task,))
    await wire.let(2)  # the chunk that was on its way to the stream, then the word
    await settled()
    assert (decode(wire.frames[-1]), len(wire.frames)) == (Cancel(1), 4)
    pump.cancel()


async def test_closing_fails_everyone_who_waits_and_who_comes() -> None:
    box = outbox(places=1)
    under_way, waiting = sending(box, 1, 1), sending(box, 2, 1)
    box.post(bytes(MAX_WAITING_BYTES * 3 // 4))
    small = asyncio.create_task(box.put(b"x"))
    await settled()
    box.finish(None, ERROR)
    for task in (under_way, waiting, small, sending(box, 3, 1), asyncio.create_task(box.put(b"x"))):
        with pytest.raises(Unreachable):
            await task
    with pytest.raises(Unreachable):
        box.post(b"x")


async def test_small_frames_are_bounded() -> None:
    box, wire = outbox(), Wire()
    for _ in range(2):
        box.post(bytes(MAX_WAITING_BYTES // 2))
    with pytest.raises(Stalled, match="does not read"):
        box.post(b"x")
    puts = [asyncio.create_task(box.put(b"%d" % n)) for n in range(3)]
    await settled()
    assert box.waiting_bytes == MAX_WAITING_BYTES
    pump = asyncio.create_task(box.pump(wire.write))
    await wire.let(5)
    await asyncio.gather(*puts)
    assert wire.frames[2:] == [b"0", b"1", b"2"]
    pump.cancel()


def test_the_meter_smooths_round_trips_and_ignores_strange_pongs() -> None:
    clock = ManualClock()
    meter = Meter(clock)
    token = meter.ping()
    clock.now += 0.8
    meter.pong(token + 1)
    assert meter.figures().round_trip_s == 0
    meter.pong(token)
    meter.pong(token)
    assert meter.figures().round_trip_s == pytest.approx(0.8)
    token = meter.ping()
    clock.now += 1.6
    meter.pong(token)
    assert meter.figures().round_trip_s == pytest.approx(1.2)


def test_the_meter_knows_silence_and_forgives_our_own() -> None:
    clock = ManualClock()
    meter = Meter(clock)
    meter.heard(10)
    clock.now += 5
    assert meter.silence_s() == 5
    meter.forgive(4)
    assert meter.silence_s() == 1
    meter.forgive(40)
    assert (meter.silence_s(), meter.unanswered_s()) == (0, 0)
    token = meter.ping()
    clock.now += 5
    meter.forgive(2)
    assert meter.unanswered_s() == 3
    assert meter.pong(token)
    assert meter.unanswered_s() == 0


def test_goodput_is_told_by_the_pongs_behind_whole_tensors() -> None:
    clock = ManualClock()
    meter = Meter(clock)
    meter.wrote(1000)
    meter.sending(1, 1000)
    clock.now += 1.0
    meter.pong(1)
    assert meter.figures().goodput_bytes_per_s == 0, "nothing was asked yet"
    token = meter.ping_after(1)
    clock.now += 1.0
    assert not meter.pong(token), "it is no round trip"
    assert (meter.figures().goodput_bytes_per_s, meter.figures().sent_bytes) == (500, 1000)
    assert meter.figures().round_trip_s == 0


def over_line(goodput: Goodput, sizes: list[int], rate: float, round_trip_s: float, at_once: int, now: float) -> float:
    """Sends over a line of `rate` bytes a second, `at_once` tensors under way; gives the time of the last answer."""
    free, waiting = now, list(enumerate(sizes))
    answers: list[tuple[float, int]] = []
    while waiting or answers:
        while waiting and len(answers) < at_once:
            number, size = waiting.pop(0)
            goodput.sent(number, size, now)
            free = max(free, now) + size / rate
            answers.append((free + round_trip_s, number))
        now, number = answers.pop(0)
        goodput.accepted(number, round_trip_s, now)
    return now


@pytest.mark.parametrize("rate", [2.5e6, 12.5e6, 125e6])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.02, 0.2])
@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_the_rate_is_found_however_long_the_round_trip(rate: float, round_trip_s: float, at_once: int) -> None:
    goodput = Goodput()
    over_line(goodput, [2_000_000] * 40, rate, round_trip_s, at_once, now=0.0)
    assert goodput.bytes_per_s == pytest.approx(rate, rel=0.05)


def test_a_line_that_changes_is_known_after_a_few_tensors() -> None:
    goodput = Goodput()
    now = over_line(goodput, [1_000_000] * 20, 1e8, 0.01, 1, 0.0)
    now = over_line(goodput, [1_000_000] * 10, 2e6, 0.01, 1, now)
    assert goodput.bytes_per_s == pytest.approx(2e6, rel=0.3)
    over_line(goodput, [1_000_000] * 200, 1e8, 0.01, 1, now)
    assert goodput.bytes_per_s == pytest.approx(1e8, rel=0.3)


def test_what_was_not_sent_was_refused_or_is_answered_twice_says_nothing() -> None:
    goodput = Goodput()
    goodput.accepted(1, 0.0, 1.0)
    goodput.sent(2, 1000, 1.0)
    goodput.gave_up(2)
    goodput.accepted(2, 0.0, 2.0)
    assert goodput.bytes_per_s == 0.0
    goodput.sent(3, 1000, 3.0)
    goodput.accepted(3, 0.0, 4.0)
    goodput.accepted(3, 0.0, 9.0)
    assert goodput.bytes_per_s == pytest.approx(1000.0)


def test_answers_that_come_together_after_a_delay_count_together() -> None:
    goodput = Goodput()
    for number in range(10):
        goodput.sent(number, 100_000, 0.0)
    for number in range(10):
        goodput.accepted(number, 0.0, 1.0 + number * 1e-4)
    assert goodput.bytes_per_s == pytest.approx(1_000_000, rel=0.05)


def test_a_peer_that_never_answers_fills_no_memory_and_spoils_no_later_measurement() -> None:
    goodput = Goodput()
    for number in range(2 * MOST_ON_THE_WAY):
        goodput.sent(number, 1_000_000, 0.001 * number)
    goodput.accepted(0, 0.0, 3.0)
    assert goodput.bytes_per_s == 0.0, "it was given up"
    for number in range(2 * MOST_ON_THE_WAY):
        goodput.gave_up(number)
    over_line(goodput, [2_000_000] * 40, 12.5e6, 0.02, 2, now=10.0)
    assert goodput.bytes_per_s == pytest.approx(12.5e6, rel=0.05)


SHORT_PAUSE_S = limits.PAUSE_AFTER / limits.FRAMES_A_SECOND
NONE_LEFT_UNTIL = 1e9


def drained() -> limits.CommonPatience:
    common = limits.CommonPatience(NONE_LEFT_UNTIL)
    while common.take(0.0):
        pass
    return common


def frames_in(patience: limits.Patience, seconds: float, now: float = 0.0, octets: int = 0, serves: bool = True) -> int:
    """How many are read in so long of those that are all there at once."""
    end, frames = now + seconds, 0
    while now <= end and frames < 100_000:
        now += patience.heard(now, octets, serves=serves)
        frames += 1
    return frames


def test_what_is_due_is_read_at_once() -> None:
    patience = limits.Patience(drained(), 0.0)
    assert [patience.heard(0.0) for _ in range(int(limits.IN_ADVANCE))] == [0.0] * int(limits.IN_ADVANCE)
    later = limits.MOST_SAVED / limits.FRAMES_A_SECOND
    assert [patience.heard(later) for _ in range(int(limits.MOST_SAVED))] == [0.0] * int(limits.MOST_SAVED)


def test_what_is_more_is_read_at_its_pace_in_short_pauses() -> None:
    patience = limits.Patience(drained(), 0.0)
    due = limits.IN_ADVANCE + 60 * limits.FRAMES_A_SECOND
    assert frames_in(patience, 60.0) == pytest.approx(due, abs=2 * limits.PAUSE_AFTER)
    longest_s = max(patience.heard(60.0) for _ in range(int(limits.PAUSE_AFTER)))
    assert longest_s <= SHORT_PAUSE_S + 1.001 / limits.FRAMES_A_SECOND


def test_what_all_say_beyond_their_due_is_bounded_for_all_together() -> None:
    common = limits.CommonPatience(0.0)
    links = [limits.Patience(common, 0.0) for _ in range(8)]
    next_at, frames, seconds = [0.0] * len(links), 0, 60.0
    while (now := min(next_at)) <= seconds:
        link = next_at.index(now)
        next_at[link] += links[link].heard(now) + 1e-4  # a sender that is never out of words
        frames += 1
    due = len(links) * (limits.IN_ADVANCE + seconds * limits.FRAMES_A_SECOND)
    assert frames == pytest.approx(due + limits.COMMON_SAVED + seconds * limits.COMMON_A_SECOND, rel=0.01)


def test_who_exchanges_tensors_is_read_at_once_whatever_others_say() -> None:
    patience = limits.Patience(drained(), 0.0)
    for _ in range(1000):
        patience.exchanged()
        assert [patience.heard(0.0) for _ in range(int(limits.FRAMES_A_TENSOR))] == [0.0] * int(limits.FRAMES_A_TENSOR)


def test_who_reports_of_others_tensors_is_read_at_once() -> None:
    common = drained()
    working, reporting = limits.Patience(common, 0.0), limits.Patience(common, 0.0)
    assert [reporting.heard(0.0) for _ in range(int(limits.IN_ADVANCE))] == [0.0] * int(limits.IN_ADVANCE)
    for _ in range(1000):
        working.exchanged()
        assert [reporting.heard(0.0) for _ in range(int(limits.COMMON_A_TENSOR))] == [0.0] * int(limits.COMMON_A_TENSOR)


def test_nobody_saves_without_limit() -> None:
    patience = limits.Patience(limits.CommonPatience(NONE_LEFT_UNTIL), 0.0)
    for _ in range(int(limits.MOST_SAVED)):
        patience.exchanged()
    assert frames_in(patience, 0.0, now=1e6) <= limits.MOST_SAVED + limits.COMMON_SAVED + limits.PAUSE_AFTER


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("octets", [1, 256, 4096, 30 * 1024])
def test_a_frame_weighs_what_its_bytes_do_and_twice_as_much_from_a_stranger(octets: int, serves: bool) -> None:
    weight = (1 + octets / limits.BYTES_A_FRAME) * (1 if serves else limits.STRANGERS)
    patience = limits.Patience(drained(), 0.0)
    due = (limits.IN_ADVANCE + 600 * limits.FRAMES_A_SECOND) / weight
    read = frames_in(patience, 600.0, octets=octets, serves=serves)
    assert read == pytest.approx(due, abs=3 + limits.PAUSE_AFTER / weight)


@pytest.mark.parametrize("serves", [True, False])
def test_after_the_longest_frame_the_link_is_not_silent_for_too_long(serves: bool) -> None:
    patience = limits.Patience(drained(), 0.0)
    pauses, now = [], 0.0
    for _ in range(20):
        pauses.append(patience.heard(now, MAX_SMALL_FRAME_BYTES, serves=serves))
        now += pauses[-1]
    assert pauses[-1] == limits.LONGEST_PAUSE_S < TransportSettings().stall_after_s - TransportSettings().ping_period_s


def test_who_serves_nothing_has_no_part_in_what_is_common() -> None:
    common = limits.CommonPatience(0.0)
    for stranger in [limits.Patience(common, 0.0) for _ in range(64)]:
        assert frames_in(stranger, 0.0, serves=False) <= limits.IN_ADVANCE / limits.STRANGERS + limits.PAUSE_AFTER + 1
    assert frames_in(limits.Patience(common, 0.0), 0.0) >= limits.IN_ADVANCE + limits.COMMON_SAVED


@pytest.mark.parametrize("hops", [1, 16, 256])
def test_long_paths_do_not_make_a_busy_link_slow(hops: int) -> None:
    patience = limits.Patience(drained(), 0.0)
    for _ in range(300):
        patience.exchanged(hops)
        patience.exchanged(hops)
        assert patience.heard(0.0, 80 * hops) == 0.0
        assert [patience.heard(0.0, 150) for _ in range(8)] == [0.0] * 8
        assert patience.heard(0.0, 80 * hops) == 0.0


DATA = memoryview(bytes(range(256)) * 100)
AHEAD_CHUNK = 10_000


def transfer(number: int = 1) -> OutgoingTransfer:
    return OutgoingTransfer(number, b"header", DATA, AHEAD_CHUNK)


def test_frames_made_ahead_are_the_same_frames() -> None:
    ahead, plain = transfer(), transfer()
    while not plain.finished:
        ahead.prepare()
        ahead.prepare()
        assert ahead.next_frame() == plain.next_frame()
    assert ahead.finished


async def test_the_outbox_makes_a_frame_while_the_stream_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    encode_chunk = transfers.encode_chunk

    def noted(number: int, index: int, data: memoryview) -> bytes:
        log.append(f"made {index}")
        return encode_chunk(number, index, data)

    async def slow_write(frame: bytes) -> None:
        log.append("write begins")
        for _ in range(3):
            await asyncio.sleep(0)
        log.append("write ends")

    monkeypatch.setattr(transfers, "encode_chunk", noted)
    outbox = Outbox({TrafficClass.BULK: ByteBudget(2**20, 4)})
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(outbox.pump(slow_write))
        assert await outbox.send(TrafficClass.BULK, len(DATA), transfer)
        outbox.finish(None, Unreachable("the test is over"))
    made = [f"made {index}" for index in range(3)]
    assert [entry for entry in log if entry in made] == made
    for entry in made:
        assert log[log.index(entry) - 1] == "write begins"
