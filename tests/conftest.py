"""Settings of all tests."""

import os
from collections.abc import Iterator, Mapping

# Before anything imports torch: with a thread for each core, every operator waits at a barrier for a thread that a busy
# neighbour has put aside, and seconds become minutes (5 s and 91 s beside three busy processes).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from node.local_swarm import local_swarm
from node.local_swarm.forked_nodes import ForkServer

# How long one example takes says something about the machine and its load, not about the code.
settings.register_profile("skipstone", deadline=None, max_examples=50)
settings.load_profile("skipstone")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Keeps bytes out of the names of cases: made at random or with the time, they differ between workers."""
    return "bytes" if isinstance(val, bytes) else None


class KeptServer(ForkServer):
    """A fork server that outlives its swarm: it has taken seconds to import what nodes need."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> Iterator[None]:
    """Has one server fork the nodes of all swarms with the same environment and working directory."""
    kept: dict[tuple[object, ...], KeptServer] = {}

    def server(environment: Mapping[str, str]) -> KeptServer:
        variables = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
        key = (os.getcwd(), *sorted(variables.items()))
        if key not in kept:
            while kept:
                kept.popitem()[1].end()
            kept[key] = KeptServer(variables)
            os.setpriority(os.PRIO_PROCESS, kept[key]._process.pid, 10)  # Nodes train; tests wait for commands
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_swarm, "ForkServer", server)
        yield
    for each in kept.values():
        each.end()
