import cProfile
import pstats
from collections import Counter
from dataclasses import replace

from swarm.membership.placement import Workload, choose_module
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.types import ModuleId, PeerId, PeerState
from tests.swarm.membership.announcements import announcement

MODULES = tuple(ModuleId(stage) for stage in range(4))
EVEN = (1.0, 1.0, 1.0, 1.0)


def work(*cost: float) -> Workload:
    return Workload(MODULES, cost, per_path=3)


def joined(newcomers: int, cost: tuple[float, ...] = EVEN) -> Counter[int]:
    """How many of each stage there are when newcomers come one after another, each seeing those before."""
    present: list[Announcement] = []
    for number in range(newcomers):
        own = PeerId(f"peer{number}")
        module = choose_module(own, MODULES, present, work(*cost)).value
        present.append(announcement(own, module.stage, speed=1000.0 / cost[module.stage], state=PeerState.JOINING))
    return Counter(a.module.stage for a in present if a.module is not None)


def test_empty_modules_are_taken_first_and_newcomers_at_once_spread_out() -> None:
    for number in range(20):
        present = [announcement(f"p{stage}", stage) for stage in (0, 1, 3)]
        choice = choose_module(PeerId(f"n{number}"), MODULES, present, work(100.0, 100.0, 1.0, 100.0))
        assert choice.value == ModuleId(2)
        assert choice.reason == "it has no peer"
    for present in ([], [announcement(f"p{stage}", stage) for stage in range(4)]):
        chosen = Counter(choose_module(PeerId(f"n{n}"), MODULES, present, work(*EVEN)).value for n in range(200))
        assert set(chosen) == set(MODULES)
        assert max(chosen.values()) < 100


def test_newcomers_one_after_another_fill_every_module_evenly_and_a_costly_one_more() -> None:
    assert joined(4) == {0: 1, 1: 1, 2: 1, 3: 1}
    assert joined(12) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert joined(10, (1.0, 1.0, 1.0, 7.0)) == {0: 1, 1: 1, 2: 1, 3: 7}


def test_those_that_leave_or_visit_do_not_count_and_a_stage_that_is_skipped_needs_less() -> None:
    present = [announcement(f"p{stage}", stage) for stage in range(3)]
    present.append(announcement("leaving", 3, state=PeerState.DRAINING))
    present.append(announcement("guest", None, state=PeerState.VISITING))
    assert choose_module(PeerId("n"), MODULES, present, work(*EVEN)).value == ModuleId(3)
    workload = Workload(MODULES, EVEN, per_path=1)
    present = [announcement(f"p{stage}", stage) for stage in range(4)]
    for number in range(20):
        assert choose_module(PeerId(f"n{number}"), MODULES, present, workload).value == ModuleId(0)


def test_power_counts_more_than_heads_and_an_unknown_one_is_average() -> None:
    present = [announcement("0", 0), announcement("a", 1, speed=4000.0), announcement("b", 2), announcement("c", 2)]
    present += [announcement("d", 3, speed=5000.0)]
    assert choose_module(PeerId("n"), MODULES[1:], present, work(*EVEN)).value == ModuleId(2)
    present = [announcement("0", 0), announcement("new", 1, speed=0.0), announcement("b", 2), announcement("c", 3)]
    assert {choose_module(PeerId(f"n{n}"), MODULES, present, work(*EVEN)).value for n in range(50)} == set(MODULES)


def calls_to_choose(stages: int, experts: int) -> int:
    """How many calls of functions it takes to choose among the modules, with a peer for nearly all of them."""
    modules = (ModuleId(0), *(ModuleId(stage, expert) for stage in range(1, stages) for expert in range(experts)))
    present = [replace(announcement(f"p{n}"), module=module) for n, module in enumerate(modules[:-1])]
    with cProfile.Profile() as profile:
        chosen = choose_module(PeerId("n"), modules, present, Workload(modules, (1.0,) * stages, per_path=stages - 1))
    assert chosen.value == modules[-1]
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def test_four_times_the_modules_and_peers_take_four_times_the_work() -> None:
    assert calls_to_choose(33, 32) < 5 * calls_to_choose(9, 32)
