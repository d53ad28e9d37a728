"""One life of the DHT's child process; what it is good for is in test_directory.py."""

from __future__ import annotations

import asyncio
import gc

import pytest

from protocol.dht.child import running_child
from protocol.generated import dht_process_pb2
from protocol.identity.keys import Identity
from tests.protocol.dht.running import Marked, needs_proc

pytestmark = pytest.mark.e2e


async def _some_turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@needs_proc
@pytest.mark.parametrize("between", [1, 3])
async def test_who_is_cancelled_twice_while_it_starts_leaves_nothing(marked: Marked, between: int) -> None:
    """The second one comes when a group of tasks around it ends."""

    async def start() -> None:
        async with running_child(dht_process_pb2.DhtStart(timeout_s=10.0), Identity.generate()):
            await asyncio.sleep(3600)

    for turns in range(1, 16):
        starting = asyncio.create_task(start())
        await _some_turns(turns)
        starting.cancel()
        await _some_turns(between)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert marked.processes() == {}
    gc.collect()
