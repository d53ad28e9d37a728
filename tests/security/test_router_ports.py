"""Nobody asks a router for a port unless told so, and who only looks around listens nowhere."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.home_network import why_no_namespaces

pytestmark = pytest.mark.e2e


def test_neither_a_node_with_reach_direct_nor_status_asks_the_router() -> None:
    if (reason := why_no_namespaces()) is not None:
        pytest.skip(reason)
    command = ("unshare", "-n", sys.executable, "-m", "tests.security.router_watch")
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert seen["ends"] == [0, 0]
    assert seen["asked"] == {}
    node, visitor = seen["daemons"]
    assert {"-natPortMap=0", "-autonat=0"} <= set(node) & set(visitor)
    assert "-noListenAddrs=1" in visitor
    assert not any(word.startswith("-hostAddrs") for word in visitor)
