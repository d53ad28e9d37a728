"""The last ports are tried first, and a damaged memory of them or a taken port costs nothing."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from node.network.last_ports import MAX_RUNS, last_ports, remember_ports
from protocol.transport.settings import free_port
from swarm.vocabulary.types import RunId

RUN, HERE = RunId("0" * 64), "127.0.0.1"


def test_each_run_of_a_key_has_its_own_and_the_oldest_is_forgotten(tmp_path: Path) -> None:
    key, ports = tmp_path / "key", (free_port(HERE, 0), free_port(HERE, 0))
    remember_ports(key, RUN, ports)
    assert last_ports(key, RUN, HERE) == ports
    assert last_ports(key, RunId("1" * 64), HERE) == (0, 0)
    for number in range(MAX_RUNS):
        remember_ports(key, RunId(f"{number + 1:064x}"), ports)
    assert last_ports(key, RUN, HERE) == (0, 0)
    assert last_ports(key, RunId(f"{1:064x}"), HERE) == ports
    assert [path.name for path in tmp_path.iterdir()] == ["key.ports"]


def test_a_port_in_use_is_not_taken(tmp_path: Path) -> None:
    with socket.create_server((HERE, 0)) as server:
        free = free_port(HERE, 0)
        remember_ports(tmp_path / "key", RUN, (server.getsockname()[1], free))
        assert last_ports(tmp_path / "key", RUN, HERE) == (0, free)


@pytest.mark.parametrize("damaged", ["", "[]", "{", json.dumps({RUN: [1]}), json.dumps({RUN: [-1, 65_536]})])
def test_a_damaged_memory_is_none(tmp_path: Path, damaged: str) -> None:
    (tmp_path / "key.ports").write_text(damaged)
    assert last_ports(tmp_path / "key", RUN, HERE) == (0, 0)
    remember_ports(tmp_path / "missing" / "key", RUN, (1, 2))
