"""A flood of idle connections to a node's DHT, which any host can make."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.identity.keys import Identity
from tests.protocol.dht.running import MODULE, Marked, announced, directory, needs_proc
from tests.security.strangers import idle_connection

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

STRANGERS = 300


def open_files(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@needs_proc
async def test_idle_connections_do_not_keep_honest_nodes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = Marked(monkeypatch)
    own, other = Identity.generate(), Identity.generate()
    async with directory(own) as one, directory(other, one) as two:
        daemon = marked.network_daemon_of(one.process_id)
        assert {"-connManager=1", "-connLo=160", "-connHi=256", "-connGrace=20s"} <= set(
            marked.processes()[daemon].split()
        )
        before = open_files(daemon)
        strangers = [await idle_connection(one.port) for _ in range(STRANGERS)]
        assert open_files(daemon) >= before + STRANGERS - 1
        ours = announced(other)
        await two.publish(ours)
        assert await one.look_up([MODULE]) == [ours]
        async with asyncio.timeout(90):
            while open_files(daemon) >= STRANGERS:
                await asyncio.sleep(0.2)
        again = announced(other, sequence=ours.sequence + 1)
        await two.publish(again)
        assert await one.look_up([MODULE]) == [again]
        for _, writer in strangers:
            writer.transport.abort()
