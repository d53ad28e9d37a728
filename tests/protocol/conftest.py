"""Fixtures of the protocol's tests."""

import socket

import pytest

from tests.protocol.dht.running import Marked


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Marked:
    return Marked(monkeypatch)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
