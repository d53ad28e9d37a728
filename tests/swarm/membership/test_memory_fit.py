"""Memory in placement and in moves: nobody takes what does not fit, and nobody waits for a peer without room."""

import itertools
from collections import Counter

import pytest

from swarm.membership.memory_fit import STEP_BYTES, FreeMemory, Need, free_memory_of
from swarm.membership.placement import MoveRules, MoveWatch, SwarmView, Workload, choose_module, modules_that_fit
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, Reasoned
from tests.swarm.membership.announcements import announcement

GB = 10**9
DATA, SMALL, LARGE = (ModuleId(stage) for stage in range(3))
MODULES = (DATA, SMALL, LARGE)
WORK = Workload(MODULES, (1.0, 1.0, 6.0), per_path=2)
NEEDS = {DATA: Need(GB // 2, 0, ""), SMALL: Need(GB // 4, GB // 4, ""), LARGE: Need(3 * GB, 3 * GB, "")}


def room(memory: int, device: int | None = None) -> FreeMemory:
    return FreeMemory(Reasoned(memory, "here"), None if device is None else Reasoned(device, "on the card"))


def placed(limits: list[int]) -> list[ModuleId | None]:
    """Where peers with such limits go that come one after another to a data node; None for one that fits nowhere."""
    present = [announcement("data", 0)]
    found: list[ModuleId | None] = []
    for number, limit in enumerate(limits):
        fitting = modules_that_fit(MODULES[1:], room(limit), NEEDS)
        own = PeerId(f"peer {number}")
        module = choose_module(own, fitting, present, WORK, needs=NEEDS).value if fitting else None
        found.append(module)
        if module is not None:
            present.append(announcement(own, module, speed=1000.0 / WORK.cost[module.stage], memory_bytes=limit))
    return found


@pytest.mark.parametrize("limits", list(itertools.permutations([GB, 8 * GB])))
def test_two_peers_take_the_stages_that_fit_them(limits: tuple[int, int]) -> None:
    assert dict(zip(limits, placed(list(limits)), strict=True)) == {GB: SMALL, 8 * GB: LARGE}


def test_the_large_stage_comes_first_who_fits_nowhere_takes_nothing_and_power_still_counts() -> None:
    """Whatever its hash is: else half of the large peers would sit down in the small stage."""
    for number in range(40):
        choice = choose_module(PeerId(f"n{number}"), MODULES[1:], [announcement("data", 0)], WORK, needs=NEEDS)
        assert choice == Reasoned(LARGE, "it has no peer, and needs the most memory of several")
    assert placed([GB // 3]) == [None]
    counted = Counter(placed([8 * GB] * 7))
    assert counted == {LARGE: 6, SMALL: 1}, "of seven large peers six go where six parts of seven are to be done"


def moved(own: Announcement, others: tuple[Announcement, ...], *, at: float) -> ModuleId | None:
    """Where `own`, which serves the small stage, goes when it has looked on for so many seconds."""
    watch = MoveWatch(WORK, MoveRules())
    goal: ModuleId | None = None
    fitting = modules_that_fit([LARGE], free_memory_of(own), NEEDS)
    proven = frozenset(each.peer for each in others)
    for second in range(int(at) + 1):
        standing = SwarmView(own, others, 1000.0, dict.fromkeys(fitting, 15.0), proven, NEEDS)
        goal = watch.consider(standing, float(second)).value
    return goal


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_nobody_waits_for_a_peer_that_has_no_room_where_it_should_go(names: str) -> None:
    small, large = (
        announcement(name, SMALL, memory_bytes=size) for name, size in zip(names, (GB, 8 * GB), strict=True)
    )
    data, rules = announcement("data", DATA), MoveRules()
    assert moved(large, (small, data), at=rules.empty_after_s) == LARGE
    assert moved(small, (large, data), at=10 * rules.turn_s) is None


def test_who_lies_about_its_memory_holds_up_a_move_by_a_turn() -> None:
    rules, data = MoveRules(), announcement("data", DATA)
    for number in range(10):
        honest = announcement("honest", SMALL, memory_bytes=8 * GB)
        liar = announcement(f"liar {number}", SMALL, memory_bytes=2**47)
        assert moved(honest, (liar, data), at=rules.empty_after_s + rules.turn_s) == LARGE


def test_who_says_nothing_of_its_memory_is_taken_to_have_enough() -> None:
    silent = announcement("a", SMALL)
    assert free_memory_of(silent).lacks(NEEDS[LARGE]) is None
    assert moved(silent, (announcement("b", SMALL, memory_bytes=GB), announcement("data", DATA)), at=5.0) == LARGE


def test_room_is_announced_in_steps_that_tell_little() -> None:
    assert room(10 * STEP_BYTES + 17).announced == (10 * STEP_BYTES, 0)
    assert room(17, 2 * STEP_BYTES).announced == (STEP_BYTES, 2 * STEP_BYTES), "0 would say that nothing is known"
    assert FreeMemory(Reasoned(None, "nobody knows"), None).announced == (0, 0)


def test_room_reaches_as_far_as_others_must_see() -> None:
    need = Need(STEP_BYTES + 1, 3 * STEP_BYTES, "", more_on_cpu=STEP_BYTES)
    assert room(STEP_BYTES).reaching(need) == room(6 * STEP_BYTES)
    assert room(STEP_BYTES, STEP_BYTES).reaching(need) == room(3 * STEP_BYTES, 2 * STEP_BYTES)
    plenty = room(9 * STEP_BYTES, 9 * STEP_BYTES)
    assert plenty.reaching(need) == plenty
    unknown = FreeMemory(Reasoned(None, "nobody knows"), None)
    assert unknown.reaching(need) == unknown
    said = room(STEP_BYTES).reaching(need).announced[0]
    assert free_memory_of(announcement("x", 1, memory_bytes=said)).lacks(need) is None
