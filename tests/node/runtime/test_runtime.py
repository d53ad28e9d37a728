"""Which module a node takes: what it was told, what fits, and what is left after one ran out of memory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.checkpoint.state import Resumed
from node.concurrency.compute_thread import ComputeThread
from node.concurrency.task_groups import unless
from node.context.options import NodeOptions
from node.data.places import Places
from node.model.memory_need import needs_of
from node.model.moments import MomentType
from node.observability.events import Note
from node.runtime import leave_socket as leave
from node.runtime import module_choice, node
from node.runtime import run_tokenizer as module
from node.runtime.leave_socket import ask_to_leave, door_path, leave_requests, sole_use
from node.runtime.module_choice import FittingModules, choose, choose_smaller
from node.runtime.run_tokenizer import RunTokenizer, kept_file, run_tokenizer
from node.runtime.serving import hand_over
from protocol.identity.keys import Identity
from protocol.manifest.join_link import JoinLink
from protocol.manifest.manifest import DataSection
from swarm.membership.room import STEP_BYTES, size_text
from swarm.pipeline.custody import DEFAULT_SLOTS
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import IdentityError, OutOfMemory, Unreachable
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned, RunId
from tests.node.small_manifest import small_manifest
from tests.swarm.membership.announcements import announcement

DATA, SMALL, LARGE, MIDDLE = (ModuleId(stage) for stage in range(4))
MANIFEST = small_manifest(stages__blocks=(0, 4, 40, 20))
NEEDS = needs_of(MANIFEST, DEFAULT_SLOTS)
LINK = JoinLink(RunId("0" * 64), ("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWJRSrypvnpHgc6ZAgyCni4KcSmbV7uGRaMw5LgMKT18fq",))
NO_TEXT: Reasoned[Places | None] = Reasoned(None, "not said")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_choice, "LOOK_AROUND_S", 0.0)


class Session:
    def __init__(self, *present: Announcement) -> None:
        self._present = present
        self.own = SimpleNamespace(peer=PeerId("own"))
        self.membership_sync = self

    async def alive(self, modules: object) -> tuple[Announcement, ...]:
        return self._present


class Events(list[Note]):
    def emit(self, event: Any) -> None:
        self.append(event)


def in_steps(size_bytes: int) -> int:
    return max(1, size_bytes // STEP_BYTES) * STEP_BYTES


def told(limit: int | None = None, **changes: Any) -> NodeOptions:
    words = None if limit is None else str(limit)
    options: dict[str, Any] = {"link": LINK, "manifest_path": None, "reads_text": False, "memory_limit": words}
    return NodeOptions(**{**options, **changes})


async def chosen(
    options: NodeOptions, resumed: Resumed | None = None, events: Events | None = None
) -> Reasoned[ModuleId]:
    session: Any = Session(announcement("data", 0))
    fitting = FittingModules(MANIFEST, options, CPU)
    found = resumed or Resumed()
    return await choose(options, session, fitting, MANIFEST, found, NO_TEXT, Events() if events is None else events)


async def test_the_largest_module_that_fits_is_taken_of_those_nobody_serves() -> None:
    assert (await chosen(told())).value == LARGE
    assert (await chosen(told(NEEDS[LARGE].all - 1))).value == MIDDLE
    assert (await chosen(told(NEEDS[MIDDLE].all - 1))).value == SMALL


async def test_where_nothing_fits_it_says_what_would() -> None:
    limit = NEEDS[SMALL].all - 1
    with pytest.raises(OutOfMemory, match=r"the smallest, 1\.0, takes .* under --memory-limit") as refused:
        await chosen(told(limit))
    assert refused.value.exit_code == 71
    assert str(refused.value).endswith("there is room for 0.0")
    assert size_text(limit) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_only_who_lacks_room_announces_what_it_has() -> None:
    """Older peers refuse records with fields that they do not know, and nobody else needs to know."""
    least = NEEDS[LARGE].all
    assert FittingModules(MANIFEST, told(least), CPU).announced() == (0, 0)
    assert FittingModules(MANIFEST, told(least - 1), CPU).announced() == (
        max(1, (least - 1) // STEP_BYTES) * STEP_BYTES,
        0,
    )


def test_who_needs_less_than_others_reckon_announces_what_they_would_look_for() -> None:
    """Others know the needs from the manifest, and nothing of this node's moments."""
    wide = small_manifest(stages__blocks=(1, 8, 9), model__hidden=64, model__feed_forward=192)
    packed, plain = (needs_of(wide, DEFAULT_SLOTS, moments) for moments in (MomentType.EIGHT_BIT, MomentType.FLOAT32))
    first, second = ModuleId(1), ModuleId(2)
    assert packed[first].all < packed[second].all < plain[first].all
    limit = packed[second].all - 1
    fitting = FittingModules(wide, told(limit, moments=MomentType.EIGHT_BIT), CPU)
    assert fitting.of([first, second]) == [first]
    announced = fitting.announced()[0]
    assert announced == -(-plain[first].all // STEP_BYTES) * STEP_BYTES
    assert FittingModules(wide, told(limit), CPU).of([first, second]) == []


async def test_a_module_that_was_asked_for_is_refused_before_anything_is_made() -> None:
    with pytest.raises(OutOfMemory, match=r"module 2\.0 takes .*; there is room for 0\.0, 1\.0, 3\.0"):
        await chosen(told(NEEDS[LARGE].all - 1, stage="2"))
    assert (await chosen(told(NEEDS[LARGE].all, stage="2"))).value == LARGE


async def test_the_module_of_a_checkpoint_gives_way_where_it_has_become_too_large() -> None:
    events = Events()
    assert await chosen(told(), Resumed(SMALL)) == Reasoned(SMALL, "the one in its checkpoint")
    found = await chosen(told(NEEDS[LARGE].all - 1), Resumed(LARGE), events)
    assert found.value == MIDDLE
    assert events[0].message.startswith("not the module in its checkpoint: module 2.0 takes")


async def test_after_running_out_of_memory_only_smaller_modules_are_left() -> None:
    """Whatever room there seems to be: what failed, and all that is as large, is not tried again."""
    options, session = told(), Session(announcement("data", 0))
    fitting = FittingModules(MANIFEST, options, CPU)
    error = OutOfMemory("the compute device is out of memory")
    sequence = [LARGE]
    for _ in range(2):
        failed = sequence[-1]
        found = await choose_smaller(error, failed, options, session, fitting, MANIFEST)  # type: ignore[arg-type]
        assert found.reason.startswith(f"module {failed} ran out of memory; of the smaller ones, ")
        sequence.append(found.value)
    with pytest.raises(OutOfMemory, match="the compute device is out of memory"):
        await choose_smaller(error, SMALL, options, session, fitting, MANIFEST)  # type: ignore[arg-type]
    assert sequence == [LARGE, MIDDLE, SMALL]


@pytest.mark.parametrize("changes", [{"stage": "2"}, {"link": None, "manifest_path": Path("run.toml")}])
async def test_who_was_told_its_module_takes_no_other(changes: dict[str, Any]) -> None:
    options = told(**changes)
    fitting = FittingModules(MANIFEST, options, CPU)
    session: Any = Session()
    with pytest.raises(OutOfMemory):
        await choose_smaller(OutOfMemory("none left"), LARGE, options, session, fitting, MANIFEST)


async def test_a_node_that_runs_out_of_memory_goes_on_with_a_smaller_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the node's own loop: nothing is restarted, and the person is told."""
    served: list[ModuleId] = []

    async def serve(given: Any, moving: object, folder: object, stop: asyncio.Event) -> None:
        served.append(given.module)
        if given.module != SMALL:
            raise OutOfMemory("the compute device is out of memory")

    async def withdraw(patience_s: float) -> None:
        return None

    monkeypatch.setattr(node, "serve_module", serve)
    monkeypatch.setattr(node, "Proofs", lambda session: None)
    monkeypatch.setattr(node, "replace", lambda given, **changes: SimpleNamespace(**{**vars(given), **changes}))
    session, events, options = Session(announcement("data", 0)), Events(), told()
    session.withdraw = withdraw  # type: ignore[attr-defined]
    given: Any = SimpleNamespace(
        module=LARGE, options=options, session=session, manifest=MANIFEST, events=events, router=None
    )
    fitting = FittingModules(MANIFEST, options, CPU)
    with ComputeThread() as given.compute:
        await node._serve(given, None, fitting, None, asyncio.Event())  # type: ignore[arg-type]
    assert served == [LARGE, MIDDLE, SMALL]
    assert [event.level for event in events] == ["warning", "warning"]
    assert "out of memory; module 3.0: module 2.0 ran out of memory" in events[0].message
    assert fitting.of(MANIFEST.modules(), held=SMALL) == [DATA, SMALL], "a mover does not go back to what failed"
    assert session.own.memory_bytes == in_steps(NEEDS[MIDDLE].all)


HOLDER = """
import asyncio, sys
from pathlib import Path
from node.runtime.leave_socket import leave_requests, sole_use

async def main():
    path = Path(sys.argv[1])
    async with sole_use(path), leave_requests(path, lambda: None):
        print("held", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    Identity.create(tmp_path / "identity.key")
    return tmp_path / "identity.key"


async def test_a_second_node_with_the_key_is_told_who_has_it(key: Path) -> None:
    holder = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, str(key), stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    with pytest.raises(IdentityError, match=rf"another node \(process {holder.pid}\).*{key}") as told:
        async with sole_use(key):
            pytest.fail("two nodes have one key")
    assert told.value.exit_code == 78
    assert Identity.load(key).peer, "commands that only read it are not kept out"
    holder.kill()
    async with sole_use(key):  # the kernel frees it
        pass
    await holder.wait()


async def test_connections_that_say_nothing_do_not_keep_the_owner_out(key: Path) -> None:
    asked = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        async with leave_requests(key, asked.set):
            port = json.loads(door_path(key).read_text())["port"]
            idle = [await asyncio.open_connection(leave.LOOPBACK, port) for _ in range(2 * leave.MAX_CONVERSATIONS)]
            leaving = tasks.create_task(ask_to_leave(key, 10.0))
            await asked.wait()
        await leaving
    for _, writer in idle:
        writer.close()


async def test_who_says_nothing_is_not_listened_to_for_ever(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "LISTEN_S", 0.01)
    async with leave_requests(key, lambda: pytest.fail("nobody has asked")):
        reader, writer = await asyncio.open_connection(leave.LOOPBACK, json.loads(door_path(key).read_text())["port"])
        async with asyncio.timeout(10):
            assert await reader.read(1) == b""
        writer.close()


async def test_who_has_asked_waits_as_long_as_it_takes(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leave, "LISTEN_S", 0.05)
    asked = asyncio.Event()
    async with leave_requests(key, asked.set):
        leaving = asyncio.create_task(ask_to_leave(key, 10.0))
        await asked.wait()
        await asyncio.wait((leaving,), timeout=0.3)
        assert not leaving.done(), "the node is still there"
    await leaving
    assert not os.path.lexists(door_path(key))


FILE = b"the tokenizer"
SHA256 = hashlib.sha256(FILE).hexdigest()
TEXT: Reasoned[Places | None] = Reasoned(Places(Path("text")), "where --text says")
NO_TOKENIZER_TEXT: Reasoned[Places | None] = Reasoned(None, "say with --text")
TOKENIZER_LINK: Any = object()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    async def fetch(session: object, sha256: str, patience_s: float) -> bytes:
        asked.append(sha256)
        return FILE

    monkeypatch.setattr(module, "fetch_tokenizer", fetch)
    return asked


def data(file: Path) -> DataSection:
    return DataSection(source="path:x", tokenizer=f"file:{file}", tokenizer_sha256=SHA256)


async def found(
    tmp_path: Path, text: Reasoned[Places | None] = TEXT, *, own: bool = False, **options: Any
) -> RunTokenizer:
    given = NodeOptions(
        identity_path=tmp_path / "home" / "key", **{"link": TOKENIZER_LINK, "manifest_path": None, **options}
    )
    session: Any = None
    return await run_tokenizer(given, session, data(tmp_path / "there.json"), text, own=own)


async def test_who_has_named_none_gets_it_from_peers_once(tmp_path: Path, fetched: list[str]) -> None:
    first = await found(tmp_path)
    kept = kept_file(tmp_path / "home" / "key", SHA256)
    assert first.text.value == Places(Path("text"), kept)
    assert (first.content, kept.read_bytes()) == (FILE, FILE)
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert await found(tmp_path) == first
    assert fetched == [SHA256]


async def test_what_is_kept_is_hashed_again(tmp_path: Path, fetched: list[str]) -> None:
    kept = kept_file(tmp_path / "home" / "key", SHA256)
    await found(tmp_path)
    kept.write_bytes(b"something else")
    assert (await found(tmp_path)).content == FILE
    assert kept.read_bytes() == FILE
    assert len(fetched) == 2


async def test_a_file_that_is_named_is_given_away_only_if_it_is_the_runs(tmp_path: Path, fetched: list[str]) -> None:
    named = tmp_path / "named.json"
    named.write_bytes(b"a secret of this machine")
    other = await found(tmp_path, tokenizer=named)
    assert other.content is None
    assert other.text.value == Places(Path("text"), named), "what is wrong with it is said where it is opened"
    named.write_bytes(FILE)
    assert (await found(tmp_path, tokenizer=named)).content == FILE
    (tmp_path / "there.json").write_bytes(FILE)
    assert (await found(tmp_path, own=True)).text.value == Places(Path("text"), tmp_path / "there.json")
    assert fetched == []


@pytest.mark.parametrize("options", [{"reads_text": False}, {"stage": "1"}])
async def test_who_reads_no_text_asks_nobody(tmp_path: Path, fetched: list[str], options: dict[str, Any]) -> None:
    assert await found(tmp_path, **options) == RunTokenizer(TEXT)
    assert await found(tmp_path, NO_TOKENIZER_TEXT) == RunTokenizer(NO_TOKENIZER_TEXT)
    assert fetched == []


async def test_where_nobody_gives_it_the_option_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(session: object, sha256: str, patience_s: float) -> bytes:
        raise Unreachable("no peer has given it")

    monkeypatch.setattr(module, "fetch_tokenizer", fetch)
    first: dict[str, Any] = {"link": None, "manifest_path": tmp_path / "run.toml"}
    for options in ({}, first):
        refused = await found(tmp_path, **options)
        assert refused.content is None
        assert refused.text.value is None
        assert "--tokenizer" in refused.text.reason


async def test_what_is_to_be_handed_over_is_waited_for() -> None:
    done: list[int] = []

    async def finish() -> None:
        await asyncio.sleep(0)
        done.append(1)

    await hand_over(finish, 60.0)
    assert done == [1]


async def test_what_takes_too_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await hand_over(endless, 0.01)
    assert cancelled.is_set()
    assert "given up" in caplog.text


async def test_what_is_wanted_comes_unless_the_stop_comes_first() -> None:
    async def five() -> int:
        return 5

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    stop = asyncio.Event()
    assert await unless(stop, five()) == 5
    stop.set()
    assert await unless(stop, never()) is None


CHUNKS = 100
PAGES_OF_A_CHUNK = 128

PROGRAM = f"""
import resource
from node.runtime.malloc import keep_freed_memory
if not keep_freed_memory():
    raise SystemExit("unsupported")
data = memoryview(bytearray(512 * 1024))
def make():
    return [b"".join((b"prefix", data)) for _ in range(4)]
make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({CHUNKS} // 4):
    make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_chunks_do_not_fault_their_pages_in_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    if "unsupported" in done.stderr:
        pytest.skip("the C library has no mallopt")
    assert int(done.stdout) < CHUNKS * PAGES_OF_A_CHUNK / 10
