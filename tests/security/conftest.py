"""One besieged swarm for all tests of this folder that ask for it: starting one takes longer than most attacks."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.security.siege import Siege, siege


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One after the other in one process, where tests run in several, if they share the swarm."""
    for item in items:
        if isinstance(item, pytest.Function) and "swarm_under_siege" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("security"))


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def swarm_under_siege(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Siege]:
    """In a task of its own, because a fixture's end runs in another task than its beginning."""
    ready: asyncio.Future[Siege] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def besieged() -> None:
        try:
            async with siege(tmp_path_factory.mktemp("siege")) as scene:
                ready.set_result(scene)
                await over.wait()
                counts = await scene.to_the_end()
                assert counts.started == counts.completed + counts.abandoned
                assert counts.duplicated == 0
                assert counts.abandoned < counts.completed / 100
        finally:
            ready.cancel()

    running = asyncio.create_task(besieged())
    await asyncio.wait((ready, running), return_when=asyncio.FIRST_COMPLETED)
    yield await ready if not running.done() else await running  # type: ignore[misc]
    over.set()
    await running


@pytest_asyncio.fixture(loop_scope="package")
async def scene(swarm_under_siege: Siege) -> AsyncIterator[Siege]:
    """The swarm, which must be unhurt and at work after each attack."""
    yield swarm_under_siege
    await swarm_under_siege.goes_on()
    swarm_under_siege.is_unhurt()
