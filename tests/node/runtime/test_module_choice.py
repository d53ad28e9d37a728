"""Which module a node takes: what it was told, what fits, and what is left after one ran out of memory."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.checkpoint.state import ResumedState
from node.concurrency.compute_thread import ComputeThread
from node.context.options import NodeOptions
from node.data.local_paths import LocalPaths
from node.model.memory_need import needs_of
from node.model.moments import DEFAULT_SLOTS, MomentType
from node.runtime import hosting, module_choice
from node.runtime.hosting import Hosting
from node.runtime.module_choice import FittingModules
from protocol.manifest.join_link import JoinLink
from swarm.membership.memory_fit import STEP_BYTES, FreeMemory, size_text
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import OutOfMemory
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned, RunId
from tests.kit.events import KeptEvents
from tests.node.small_manifest import small_manifest
from tests.swarm.membership.announcements import announcement

DATA, SMALL, LARGE, MIDDLE = (ModuleId(stage) for stage in range(4))
MANIFEST = small_manifest(stages__blocks=(0, 4, 40, 20))
NEEDS = needs_of(MANIFEST, DEFAULT_SLOTS)
LINK = JoinLink(RunId("0" * 64), ("/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWJRSrypvnpHgc6ZAgyCni4KcSmbV7uGRaMw5LgMKT18fq",))
NO_TEXT: Reasoned[LocalPaths | None] = Reasoned(None, "not said")
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


def in_steps(size_bytes: int) -> int:
    return max(1, size_bytes // STEP_BYTES) * STEP_BYTES


def told(limit: int | None = None, **changes: Any) -> NodeOptions:
    words = None if limit is None else str(limit)
    options: dict[str, Any] = {"link": LINK, "manifest_path": None, "reads_text": False, "memory_limit": words}
    return NodeOptions(**{**options, **changes})


async def chosen(
    options: NodeOptions, resumed: ResumedState | None = None, events: KeptEvents | None = None
) -> Reasoned[ModuleId]:
    session: Any = Session(announcement("data", 0))
    fitting = FittingModules(MANIFEST, options, CPU)
    return await fitting.choose(session, resumed or ResumedState(), NO_TEXT, events or KeptEvents())


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
    assert FittingModules(MANIFEST, told(least - 1), CPU).announced() == (in_steps(least - 1), 0)


def test_who_needs_less_than_others_reckon_announces_what_they_would_look_for() -> None:
    """Others know the needs from the manifest, and nothing of this node's moments."""
    wide = small_manifest(stages__blocks=(1, 8, 9), model__hidden=64, model__feed_forward=192)
    packed, plain = (needs_of(wide, DEFAULT_SLOTS, moments) for moments in (MomentType.EIGHT_BIT, MomentType.FLOAT32))
    first, second = ModuleId(1), ModuleId(2)
    assert packed[first].all < packed[second].all < plain[first].all
    limit = packed[second].all - 1
    fitting = FittingModules(wide, told(limit, moments=MomentType.EIGHT_BIT), CPU)
    assert fitting.of([first, second]) == [first]
    assert fitting.announced()[0] == -(-plain[first].all // STEP_BYTES) * STEP_BYTES
    assert FittingModules(wide, told(limit), CPU).of([first, second]) == []


async def test_a_module_that_was_asked_for_is_refused_before_anything_is_made() -> None:
    with pytest.raises(OutOfMemory, match=r"module 2\.0 takes .*; there is room for 0\.0, 1\.0, 3\.0"):
        await chosen(told(NEEDS[LARGE].all - 1, stage="2"))
    assert (await chosen(told(NEEDS[LARGE].all, stage="2"))).value == LARGE


async def test_the_module_of_a_checkpoint_gives_way_where_it_has_become_too_large() -> None:
    events = KeptEvents()
    assert await chosen(told(), ResumedState(SMALL)) == Reasoned(SMALL, "resumed from the checkpoint")
    assert (await chosen(told(NEEDS[LARGE].all - 1), ResumedState(LARGE), events)).value == MIDDLE
    assert events.events[0].message.startswith("cannot resume the checkpoint's module: module 2.0 takes")


async def test_after_running_out_of_memory_only_smaller_modules_are_left() -> None:
    """Whatever room there seems to be: what failed, and all that is as large, is not tried again."""
    options, session = told(), Session(announcement("data", 0))
    fitting = FittingModules(MANIFEST, options, CPU)
    error = OutOfMemory("the compute device is out of memory")
    sequence = [LARGE]
    for _ in range(2):
        failed = sequence[-1]
        found = await fitting.choose_smaller(error, failed, session)  # type: ignore[arg-type]
        assert found.reason.startswith(f"module {failed} ran out of memory; among smaller ones: ")
        sequence.append(found.value)
    with pytest.raises(OutOfMemory, match="the compute device is out of memory"):
        await fitting.choose_smaller(error, SMALL, session)  # type: ignore[arg-type]
    assert sequence == [LARGE, MIDDLE, SMALL]


def test_modules_of_one_process_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that has not stepped yet has not allocated all that it needs; later, the free memory shows it."""
    room, beside = NEEDS[LARGE].all + NEEDS[MIDDLE].all, list[Any]()
    monkeypatch.setattr(module_choice, "free_memory_on", lambda device: FreeMemory(Reasoned(room, "free"), None))
    modules = [SMALL, LARGE, MIDDLE]

    def fit(limit: int | None = None, held: ModuleId | None = None) -> list[ModuleId]:
        return FittingModules(MANIFEST, told(limit), CPU, lambda: beside).of(modules, held)

    assert fit() == modules
    beside.append(SimpleNamespace(module=LARGE, steps=0))
    assert fit() == [SMALL, MIDDLE]
    beside.append(SimpleNamespace(module=None, steps=0))  # on its way, without a module yet
    beside.append(SimpleNamespace(module=MIDDLE, steps=0))
    assert fit() == []
    room -= NEEDS[LARGE].all
    beside[:] = [SimpleNamespace(module=LARGE, steps=1)]
    assert fit() == [SMALL, MIDDLE], "counted once"
    room *= 100
    assert fit() == modules
    assert fit(NEEDS[LARGE].all + NEEDS[MIDDLE].all) == [SMALL, MIDDLE], "the limit is for all of them"
    assert fit(NEEDS[LARGE].all + NEEDS[SMALL].all - 1) == []


@pytest.mark.parametrize("changes", [{"stage": "2"}, {"link": None, "manifest_path": Path("run.toml")}])
async def test_who_was_told_its_module_takes_no_other(changes: dict[str, Any]) -> None:
    fitting = FittingModules(MANIFEST, told(**changes), CPU)
    session: Any = Session()
    with pytest.raises(OutOfMemory):
        await fitting.choose_smaller(OutOfMemory("none left"), LARGE, session)


async def test_a_node_that_runs_out_of_memory_goes_on_with_a_smaller_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the node's own loop: nothing is restarted, and the person is told."""
    served: list[ModuleId] = []

    async def serve(given: Any, moving: object, folder: object, stop: asyncio.Event, kept: object) -> None:
        served.append(given.module)
        if given.module != SMALL:
            raise OutOfMemory("the compute device is out of memory")

    async def withdraw(patience_s: float) -> None:
        return None

    monkeypatch.setattr(hosting, "serve_module", serve)
    monkeypatch.setattr(hosting, "Proofs", lambda *arguments: SimpleNamespace(signer=None, heard=None))
    monkeypatch.setattr(hosting, "replace", lambda given, **changes: SimpleNamespace(**{**vars(given), **changes}))
    session, events, options = Session(announcement("data", 0)), KeptEvents(), told()
    session.withdraw = withdraw  # type: ignore[attr-defined]
    given: Any = SimpleNamespace(
        module=LARGE, options=options, session=session, manifest=MANIFEST, events=events, router=None
    )
    given.proofs = SimpleNamespace(signer=None, heard=None)
    fitting = FittingModules(MANIFEST, options, CPU)
    entered: Any = SimpleNamespace(signed=None, pauses=hosting.Pauses())
    with ComputeThread() as given.compute:
        await Hosting(entered, None)._serve(given, fitting, None, asyncio.Event())  # type: ignore[arg-type]
    assert served == [LARGE, MIDDLE, SMALL]
    assert [event.level for event in events.events] == ["warning", "warning"]
    assert "out of memory; module 3.0: module 2.0 ran out of memory" in events.events[0].message
    assert fitting.of(MANIFEST.modules(), held=SMALL) == [DATA, SMALL], "a mover does not go back to what failed"
    assert session.own.memory_bytes == in_steps(NEEDS[MIDDLE].all)
