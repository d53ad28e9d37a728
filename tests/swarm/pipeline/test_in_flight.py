from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.pipeline.in_flight import Counts, Flight, FlightRules, Flights, StepDone
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, Path, PeerId

OWN = PeerId("data")
PLANNED = Path(OWN, (Hop(ModuleId(1), PeerId("a")),))
TAKEN = PLANNED.with_peer(0, PeerId("b"))


def flights(per_step: int = 3, staleness: int = 0, window: int = 100, steps: int | None = None) -> Flights:
    return Flights(OWN, FlightRules(per_step, staleness, window, steps))


def start_all(account: Flights) -> list[Flight]:
    """As many as may start."""
    started = []
    while account.may_start().value:
        started.append(account.start(PLANNED, now=0.0))
    return started


def complete(account: Flights, flight: Flight, loss: float = 1.0) -> StepDone | None:
    account.returned(flight.microbatch, TAKEN, loss)
    return account.complete(flight.microbatch)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_later_step_waits_until_the_current_one_is_complete(staleness: int) -> None:
    account = flights(staleness=staleness)
    begun = start_all(account)
    assert len(begun) == 3 * (1 + staleness)
    assert account.may_start().reason == "step 1 is not complete"
    for flight in begun[:2]:
        complete(account, flight)
        assert not account.may_start().value
    complete(account, begun[2])
    assert len(start_all(account)) == 3


def test_an_abandoned_microbatch_makes_room_for_another() -> None:
    account = flights()
    begun = start_all(account)
    assert account.abandon(begun[0].microbatch) == begun[0]
    assert len(start_all(account)) == 1


def test_the_window_bounds_what_is_under_way() -> None:
    account = flights(per_step=10, window=4)
    begun = start_all(account)
    assert len(begun) == 4
    assert account.may_start().reason == "the window of 4 is full"
    complete(account, begun[0])
    assert len(start_all(account)) == 1


def test_no_more_starts_than_the_steps_asked_for_need() -> None:
    account = flights(staleness=5, steps=2)
    begun = start_all(account)
    assert len(begun) == 6
    for flight in begun[:-1]:
        complete(account, flight)
    assert not account.finished
    account.abandon(begun[-1].microbatch)
    assert not account.finished, "a step is one short"
    (last,) = start_all(account)
    complete(account, last)
    assert account.finished
    assert not account.may_start().value


def test_without_a_limit_it_never_finishes() -> None:
    account = flights()
    for flight in start_all(account):
        complete(account, flight)
    assert account.steps_done == 1
    assert not account.finished


def test_a_step_reports_the_mean_loss_of_its_own_microbatches() -> None:
    account = flights(staleness=1)
    begun = start_all(account)
    done = [complete(account, flight, loss) for flight, loss in zip(begun, (1.0, 2.0, 6.0, 4.0, 4.0, 1.0), strict=True)]
    assert done == [None, None, StepDone(1, 3.0, 3), None, None, StepDone(2, 3.0, 3)]


def test_the_path_that_was_really_taken_is_kept() -> None:
    account = flights()
    flight = start_all(account)[0]
    account.returned(flight.microbatch, TAKEN, 2.0)
    known = account.get(flight.microbatch)
    assert known is not None
    assert (known.path, known.loss) == (TAKEN, 2.0)
    account.returned(MicrobatchId(OWN, 999), TAKEN, 1.0)
    assert account.get(MicrobatchId(OWN, 999)) is None


def test_a_second_completion_is_counted_as_the_defect_it_is() -> None:
    account = flights()
    flight = start_all(account)[0]
    complete(account, flight)
    assert account.complete(flight.microbatch) is None
    assert account.counts == Counts(started=3, completed=1, duplicated=1)


def test_what_comes_back_without_a_loss_is_abandoned_and_accounted_for() -> None:
    account = flights(per_step=1)
    (flight,) = start_all(account)
    assert account.complete(flight.microbatch) is None
    assert account.counts == Counts(started=1, abandoned=1)
    assert account.steps_done == 0
    assert account.may_start().value


def test_abandoning_twice_counts_once() -> None:
    account = flights()
    flight = start_all(account)[0]
    account.abandon(flight.microbatch)
    assert account.abandon(flight.microbatch) is None
    assert account.counts.abandoned == 1


def test_a_second_life_takes_its_numbers_from_where_it_is_told() -> None:
    account = Flights(OWN, FlightRules(1, 0, 1), first_number=5000)
    assert account.next_number == 5000
    assert account.start(PLANNED, 0.0).microbatch.number == 5000
    assert account.next_number == 5001


@settings(deadline=None)
@given(
    rules=st.builds(
        FlightRules, st.integers(1, 4), st.integers(0, 2), st.integers(1, 8), st.none() | st.integers(1, 3)
    ),
    draws=st.lists(
        st.tuples(st.sampled_from(["start", "return", "complete", "abandon"]), st.integers(0, 7)), max_size=80
    ),
)
def test_the_account_always_adds_up(rules: FlightRules, draws: list[tuple[str, int]]) -> None:
    account = Flights(OWN, rules)
    steps = 0
    for what, which in draws:
        flying = account.in_flight
        flight = flying[which % len(flying)] if flying else None
        if what == "start" and account.may_start().value:
            account.start(PLANNED, 0.0)
        elif flight is not None and what == "return":
            account.returned(flight.microbatch, TAKEN, 1.0)
        elif flight is not None and what == "complete":
            steps += account.complete(flight.microbatch) is not None
        elif flight is not None and what == "abandon":
            account.abandon(flight.microbatch)
        counts, flying = account.counts, account.in_flight
        assert counts.started == counts.completed + counts.abandoned + len(flying)
        assert counts.duplicated == 0
        assert len(flying) <= rules.window
        assert account.steps_done == steps
        assert counts.completed + len(flying) <= (account.steps_done + 1 + rules.staleness) * rules.per_step
