"""Work counted and signed by data nodes."""

import random
from dataclasses import replace

import pytest

from swarm.averaging import proven_work as proven
from swarm.vocabulary.averaging_messages import MAX_TALLIES, WorkRow, WorkTally
from swarm.vocabulary.types import Hop, MicrobatchId, ModuleId, PeerId

DATA, A, B = PeerId("data"), PeerId("a"), PeerId("b")
MODULE = ModuleId(1)


def tally(by: PeerId = DATA, at: float = 1.0, **recent: int) -> WorkTally:
    rows = tuple(WorkRow(PeerId(peer), 1, tokens, tokens) for peer, tokens in recent.items())
    return WorkTally(by, MODULE, 1, at, 10.0, rows)


def test_a_ledger_counts_all_visits_and_those_of_the_last_half_minute() -> None:
    ledger = proven.WorkLedger(DATA)
    assert ledger.tally(MODULE, 0.0, 0.0) is None
    for second in range(100):
        hops = (Hop(MODULE, A if second < 50 else B),)
        ledger.settled(MicrobatchId(DATA, second), hops, 10, float(second))
        assert second < proven.MARK_S or ledger.tally(MODULE, second, second) is not None
    made = ledger.tally(MODULE, 99.0 + proven.SIGNED_S, 7.0)
    assert made is not None
    assert made.number == 99
    assert made.at == 7.0
    assert proven.WINDOW_S <= made.window_s <= proven.WINDOW_S + proven.MARK_S + proven.SIGNED_S
    assert [(row.peer, row.visits, row.tokens) for row in made.rows] == [(B, 50, 500)], "A has stopped long ago"
    own = ledger.tally(ModuleId(0), 99.0, 7.0)
    assert own is not None
    assert own.rows[0].peer == DATA
    assert own.rows[0].visits == 100


def test_work_is_summed_over_data_nodes_and_very_little_proves_nothing() -> None:
    assert proven.proven_work((tally(a=1000, b=10), tally(PeerId("other"), a=1000))) == {A: pytest.approx(200.0)}
    assert set(proven.proven_work((tally(a=1000, b=int(1000 * proven.LEAST_SHARE) + 1),))) == {A, B}


def test_the_latest_tallies_of_a_few_data_nodes_are_kept_until_they_are_old() -> None:
    tallies = proven.Tallies()
    tallies.add(tally(at=5.0, a=10), 0.0)
    tallies.add(tally(at=4.0, b=10), 1.0)
    assert tallies.valid(1.0) == (tally(at=5.0, a=10),), "an older one cannot replace it"
    tallies.add(tally(at=4.0, b=10), proven.VALID_S + 1)
    assert tallies.valid(proven.VALID_S + 1) == (tally(at=4.0, b=10),), "the clock of a data node was set back"
    for number in range(2 * proven.MAX_KEPT):
        tallies.add(tally(PeerId(f"d{number}"), a=100 + number), proven.VALID_S + 2)
    assert len(tallies.valid(proven.VALID_S + 3)) == proven.MAX_KEPT
    assert tallies.valid(3 * proven.VALID_S) == ()


def test_an_answer_carries_few_tallies_and_few_rows() -> None:
    assert len(proven.to_carry([tally(a=1)] * (MAX_TALLIES + 1))) == MAX_TALLIES
    many = replace(tally(), rows=tuple(WorkRow(PeerId(f"p{n}"), 1, 1, 1) for n in range(256)))
    assert len(proven.to_carry([many] * MAX_TALLIES)) == 2


def test_a_replica_is_outvoted_by_two_others_with_most_of_the_work() -> None:
    work = {PeerId(peer): 1.0 for peer in "abc"}
    assert proven.outvoted({A: {DATA}, B: {DATA}}, work) == {DATA}
    assert not proven.outvoted({A: {DATA}, DATA: {A}, PeerId("name"): {A}}, work | {A: 9.0}), "one alone"
    assert not proven.outvoted({A: {DATA}, B: {DATA}}, work | {DATA: 9.0})


def test_only_others_tallies_of_a_peer_count_and_the_largest_ones_are_kept() -> None:
    credit = proven.Credit(A)
    assert not credit.add(tally(b=100))
    assert not credit.add(tally(A, a=100)), "signed by itself"
    for number in range(2 * proven.MOST_CREDITED):
        credit.add(tally(PeerId(f"d{number}"), a=1 + number))
    assert min(row.tokens for row, _ in credit.proofs) == 1 + proven.MOST_CREDITED


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("disturbed", [False, True])
def test_credits_sum_to_the_swarms_count_and_never_above_it(disturbed: bool, seed: int) -> None:
    """Peers poll data nodes that may restart; some polls fail, and tallies may come late."""
    dice, late = random.Random(seed), list[WorkTally]()
    modules, data_nodes = (ModuleId(1), ModuleId(2)), [PeerId("data0"), PeerId("data1")]
    credits = {peer: proven.Credit(peer) for peer in map(PeerId, "abcd")}
    done = dict.fromkeys(credits, 0)
    ledgers = {data_node: proven.WorkLedger(data_node) for data_node in data_nodes}
    numbers = {data_node: dice.randrange(2**46) for data_node in data_nodes}
    for second in range(240):
        for data_node in data_nodes:
            if disturbed and dice.random() < 0.02:  # drawn as by `node.runtime.resume.first_number`
                ledgers[data_node], numbers[data_node] = proven.WorkLedger(data_node), dice.randrange(2**46)
            for _ in range(dice.randrange(4) if second < 220 else 0):
                numbers[data_node] += 1
                hops = tuple(Hop(module, dice.choice([*credits])) for module in modules)
                number = max(0, numbers[data_node] - dice.randrange(5))  # microbatches complete out of order
                ledgers[data_node].settled(MicrobatchId(data_node, number), hops, 10, float(second))
                for hop in hops:
                    done[hop.peer] += 10
        if second % 5 == 4:
            told = [ledger.tally(m, float(second), float(second)) for ledger in ledgers.values() for m in modules]
            heard = [each for each in told if each is not None and not (disturbed and dice.random() < 0.3)]
            late = (late + heard)[-50:]
            for each in heard + (dice.sample(late, min(9, len(late))) if disturbed else []):
                for credit in credits.values():
                    credit.add(each)
    found = {peer: sum(row.tokens for row, _ in credit.proofs) for peer, credit in credits.items()}
    assert all(0 < found[peer] <= done[peer] for peer in done)
    assert disturbed or found == done
