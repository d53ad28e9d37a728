"""A swarm behind the WAN emulation: it trains, nobody goes past the proxies, and the folder holds what it should."""

import asyncio
import contextlib
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

from lab.audit import check_folder
from lab.emulation.proxy import Callers, read_sockets
from lab.laboratory import Mark
from lab.outcome import Row
from lab.run import Experiment
from lab.scenario import scenario_from_table
from tests.e2e.small_run import small_run, write_text

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads /proc"),
]

SCENARIO = """
name = "slow"
seed = 5
duration = 5
held_out = 2
[[group]]
name = "phones"
peers = 3
profile = "mobile"
[[event]]
at = 1
action = "shape"
peers = [1]
profile = "transatlantic"
[[event]]
at = 2
action = "freeze"
peers = [2]
for = 0.5
"""
BEHIND = "127.77."


def own_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the folder itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


class Spectator:
    """Looks at every row who has a connection to a node's own port."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.happened: list[str] = []
        self.past_the_proxy: set[tuple[str, str]] = set()
        self.through_the_proxy = 0

    def tell(self, news: str | Row | Mark) -> None:
        if isinstance(news, Mark):
            self.happened.append(news.what)
        if not isinstance(news, Row):
            return
        self.rows.append(news)
        ours = own_sockets()
        for socket in read_sockets():
            if socket.inode and socket.remote[0].startswith(BEHIND):
                if f"socket:[{socket.inode}]" in ours:
                    self.through_the_proxy += 1
                elif Callers(lambda: {0: os.getpid()}).caller(socket.local, socket.remote) == 0:  # a node's
                    self.past_the_proxy.add((str(socket.local), str(socket.remote)))


async def test_a_swarm_trains_behind_slow_links_and_leaves_a_report(tmp_path: Path) -> None:
    run = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1), staleness=1, inner_steps=8)
    table = tomllib.loads(SCENARIO)
    table["manifest"] = run.model_dump(mode="json", exclude_none=True, exclude={"name", "seed", "protocol"})
    scenario = scenario_from_table(table)
    spectator = Spectator()
    out = tmp_path / "out"
    result = await Experiment(out, spectator.tell, asyncio.Event()).run(scenario, SCENARIO, compare=True)

    outcome = result.outcome
    assert outcome is not None
    assert outcome.objections == ()
    assert not check_folder(out / "logs").violations
    assert outcome.report.ended_well == 3
    assert outcome.tokens > 0
    assert outcome.held_out_loss is not None
    assert outcome.slowest is not None
    frozen = "peer 2 frozen for 0.5 s"
    assert spectator.happened == ["peer 1 get another link: transatlantic", frozen, f"over: {frozen}"]
    assert spectator.through_the_proxy > 0
    assert spectator.past_the_proxy == set()

    calm = outcome.undisturbed
    assert calm is not None
    assert calm.tokens >= outcome.tokens
    assert not calm.report.violations

    assert (out / "scenario.toml").read_text() == SCENARIO
    tables = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    rows = [Row(**{**table, "waiting": tuple(table["waiting"])}) for table in tables]
    assert rows == spectator.rows[: len(rows)]
    assert {link for row in rows for link in row.links} >= {"0>1", "1>2", "2>0"}, "out and back, by caller"
    assert sum(outcome.traffic("up").values()) > 100_000
    report = (out / "report.md").read_text()
    assert all(words in report for words in ("**ok**", "loss relative to the undisturbed run"))
    for name in result.plots:
        assert (out / name).stat().st_size > 1000
    assert json.dumps(result.as_json())
    assert len(list((out / "undisturbed" / "logs").iterdir())) == 3
