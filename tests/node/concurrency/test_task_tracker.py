from __future__ import annotations

import asyncio

import pytest

from node.concurrency.task_groups import TaskTracker
from swarm.vocabulary.errors import Unreachable


async def set_when(gate: asyncio.Event, done: list[str], what: str) -> None:
    await gate.wait()
    done.append(what)


async def test_what_is_begun_outside_is_left_undone() -> None:
    chores, done, gate = TaskTracker(), list[str](), asyncio.Event()
    gate.set()
    chores.begin(set_when(gate, done, "before"))
    chores.owe(set_when(gate, done, "owed before"))
    assert not chores.are_running
    async with chores.running():
        assert chores.are_running
    chores.owe(set_when(gate, done, "after"))
    await asyncio.sleep(0)
    assert done == []
    assert chores.owed == 0


async def test_what_is_owed_counts_before_its_task_begins_and_until_it_is_done() -> None:
    chores, done, first, second = TaskTracker(), list[str](), asyncio.Event(), asyncio.Event()
    async with chores.running():
        chores.owe(set_when(first, done, "first"))
        chores.owe(set_when(second, done, "second"))
        chores.begin(set_when(second, done, "owed to nobody"))
        assert chores.owed == 2
        waiting = asyncio.create_task(chores.nothing_owed(60))
        first.set()
        while chores.owed == 2:
            await asyncio.sleep(0)
        assert not waiting.done()
        second.set()
        await waiting
        assert chores.owed == 0
    assert sorted(done) == ["first", "owed to nobody", "second"]


async def test_patience_ends() -> None:
    chores, impatient = TaskTracker(), asyncio.Event()

    async def go_on() -> None:
        async with chores.running():
            chores.owe(set_when(asyncio.Event(), [], "never"))
            await chores.nothing_owed(0.001)
            impatient.set()
            await asyncio.Event().wait()

    going_on = asyncio.create_task(go_on())
    await impatient.wait()
    assert chores.owed == 1
    going_on.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going_on
    assert chores.owed == 0


async def test_what_fails_is_no_longer_owed_and_ends_the_block_with_its_own_error() -> None:
    async def fail() -> None:
        raise Unreachable("gone")

    chores = TaskTracker()

    async def go_on() -> None:
        async with chores.running():
            chores.owe(fail())
            await asyncio.Event().wait()

    with pytest.raises(Unreachable):
        await go_on()
    assert chores.owed == 0
