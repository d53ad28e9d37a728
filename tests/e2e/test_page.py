"""The run's page: in a real browser beside a real swarm, and against those who should not use it."""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import LocalSwarmOptions
from node.network.client import statuses
from node.observability.events import Note
from node.observability.status import SwarmStatus
from node.runtime.limits import Limiter, read_limits, write_limits
from node.web.server import MOST_VIEWERS, SECRET, RunPage, served
from protocol.interfaces.clock import SystemClock
from protocol.transport.rate_limits import Traffic
from swarm.vocabulary.errors import ResourceExhausted
from swarm.workload.limits import Limits, Sensors
from tests.e2e.small_run import PATIENCE_S, checked, small_run, write_text
from tests.node.cli.test_rendering import HOSTILE, NESTED, peer_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
PICTURE = os.environ.get("PAGE_PICTURE")  # File that keeps a screenshot of the first test's page
LIMIT = "POST /limits HTTP/1.1"
MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


@asynccontextmanager
async def browser(**view: Any) -> AsyncIterator[Any]:
    """A tab of a real browser; its `complaints` are what its console says."""
    playwright = pytest.importorskip("playwright.async_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    async with playwright.async_playwright() as driver:
        # Nobody but the test's own server is on this machine, and root has no other sandbox.
        chromium = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = await (await chromium.new_context(**view)).new_page()
        tab.set_default_timeout(1000 * PATIENCE_S)
        tab.complaints = []
        tab.on("console", lambda said: tab.complaints.append(said.text) if said.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))
        try:
            yield tab
        finally:
            await chromium.close()


async def steps_of_curve(tab: Any) -> int:
    said = (await tab.get_attribute("#curve", "aria-label")).split()
    return int(said[-2].replace(",", "")) if "steps" in said else 0


async def curve_grows(tab: Any, by: int) -> None:
    goal = await steps_of_curve(tab) + by
    async with asyncio.timeout(PATIENCE_S):
        while await steps_of_curve(tab) < goal:
            await asyncio.sleep(0.1)


async def test_the_page_shows_a_swarm_as_it_learns_and_loses_a_peer_and_stops_it(tmp_path: Path) -> None:
    manifest = small_run(write_text(tmp_path / "text"), blocks=(0, 1, 1), inner_steps=8)
    options = LocalSwarmOptions(peers=6, threads=1, log_dir=tmp_path / "logs")
    async with LocalSwarm(manifest, options) as swarm, browser(viewport={"width": 1440, "height": 900}) as tab:
        page = RunPage(lambda: str(swarm.link), stop=swarm.request_stop)
        async with served(page, 0, partial(statuses, swarm.link)) as link:
            await tab.goto(link)
            await curve_grows(tab, by=3)
            await curve_grows(tab, by=3)
            await tab.wait_for_selector("#paths path")
            assert await tab.locator("#swarm .peer.serving").count() >= 5
            await tab.click("#axes button:has-text('time')")
            await tab.fill("#prompt", "word1 and")
            await tab.click("#sample button")
            async with asyncio.timeout(PATIENCE_S):
                while not (written := await tab.inner_text("#sampled")).startswith("word1 and"):
                    assert not written or written == "reading the model"
                    await asyncio.sleep(0.1)
            assert len(written) > len("word1 and")
            assert await tab.locator("#credit tbody tr").count() > 1
            if PICTURE is not None:
                await tab.screenshot(path=PICTURE)
            victim = next(peer for peer in swarm.peers if peer.stage == 1)
            swarm.kill(victim.index)
            short = victim.peer[-6:]
            await tab.wait_for_selector(f"#swarm .peer:is(.silent, .gone):has-text('{short}')")
            await tab.wait_for_selector(f"#events .bad:has-text('{short}')")
            await curve_grows(tab, by=5)
            await tab.set_viewport_size({"width": 390, "height": 844})
            assert await tab.evaluate("document.documentElement.scrollWidth") == 390
            assert tab.complaints == []
            await tab.click("#verbs button")
            await swarm.stop()
    checked(tmp_path / "logs")


async def hostile() -> AsyncGenerator[SwarmStatus]:
    """A run in which all that peers say is markup, or no figure at all."""
    odd = json.loads(json.dumps(NESTED).replace(json.dumps(HOSTILE), json.dumps(MARKUP)))
    while True:
        peers = [peer_of(f"12D3KooWpeer{module}", module, odd) for module in ("0.0", "1.0", f"1.{MARKUP}", MARKUP)]
        yield SwarmStatus.of(MARKUP, MARKUP, 2, tuple(peers), ("0.0", "1.0", MARKUP))
        await asyncio.sleep(0.05)


async def test_text_of_peers_is_never_markup() -> None:
    page = RunPage()
    async with browser() as tab, served(page, 0, hostile) as link:
        await tab.goto(link)
        await tab.wait_for_selector("#figures dd")
        page.emit(Note("error", MARKUP))
        await tab.wait_for_selector("#events .bad")
        assert MARKUP in await tab.inner_text("h1")
        assert await tab.locator("img, b b, #events b").count() == 0
        assert tab.complaints == []


async def test_prometheus_reads_figures_whatever_peers_say() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async with served(RunPage(), 0, hostile) as link, aiohttp.ClientSession() as session:
        async with session.get(link.partition("#")[0] + "metrics") as answer:
            text = await answer.text()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["skipstone_peers"].samples[0].value == 4
        assert {sample.labels["module"] for sample in families["skipstone_slots"].samples} >= {"0.0", "1.0"}
        async with session.get(link.partition("#")[0] + "healthz") as answer:
            assert await answer.text() == "ok\n"


async def quiet() -> AsyncGenerator[SwarmStatus]:
    while True:
        yield SwarmStatus(run="98fc", name="quiet", stages=1)
        await asyncio.sleep(0.05)


async def ended(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def asked(port: int, line: str, *headers: str) -> str:
    """The head and the beginning of the answer to a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write("\r\n".join((line, *headers, "", "")).encode())
        return (await reader.readuntil(b"\r\n\r\n")).decode()
    finally:
        await ended(writer)


async def test_only_this_machine_s_own_page_with_the_secret_can_ask_for_anything() -> None:
    left: list[str] = []
    page = RunPage(leave=lambda: left.append("left"))
    async with served(page, 0, quiet) as link:
        port = int(link.split(":")[2].split("/")[0])
        own = f"Host: 127.0.0.1:{port}"
        head = await asked(port, "GET / HTTP/1.1", own)
        assert head.startswith("HTTP/1.1 200")
        assert "default-src 'none'" in head
        assert "Access-Control" not in head
        for host in (
            "evil.example",
            f"evil.example:{port}",
            f"127.0.0.1:{port + 1}",
            "",
            f"127.0.0.1:{port}.evil.example",
        ):
            for line in ("GET / HTTP/1.1", "GET /pictures HTTP/1.1", "POST /ask/leave HTTP/1.1", LIMIT):
                assert (await asked(port, line, f"Host: {host}", f"{SECRET}: {page.secret}"))[9] == "4"
        verb = "POST /ask/leave HTTP/1.1"
        secret = f"{SECRET}: {page.secret}"
        assert "403" in await asked(port, verb, own, secret, "Origin: http://evil.example")
        assert "403" in await asked(port, verb, own)
        assert "403" in await asked(port, LIMIT, own)
        assert "403" in await asked(port, "POST /sample HTTP/1.1", own)
        assert "403" in await asked(port, verb, own, f"{SECRET}: {page.secret[:-1]}")
        assert "404" in await asked(port, "POST /ask/stop HTTP/1.1", own, secret)
        assert "405" in await asked(port, "GET /ask/leave HTTP/1.1", own, secret)
        assert "404" in await asked(port, "GET /../server.py HTTP/1.1", own)
        assert left == []
        assert "204" in await asked(port, verb, own, secret)
        assert left == ["left"]


async def test_a_limit_set_by_a_click_is_in_force_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    traffic, settings = Traffic(SystemClock()), tmp_path / "settings.toml"
    paused, page, readings = list[str](), RunPage(), Sensors(on_battery=True, temperature=61.0, power=180.0)
    acts = paused.append, lambda: paused.append("over"), lambda *_: readings
    limiter = Limiter(settings, tmp_path / "usage", traffic, page, *acts)
    page.standing, page.limit = limiter.standing, limiter.change
    running = asyncio.create_task(limiter.run(lambda _: None))
    async with browser() as tab, served(page, 0, quiet) as link:
        await tab.goto(link)
        await tab.fill("#limits input[name=upload]", "8")
        await tab.uncheck("#limits input[name=battery]")
        await tab.click("#limits button")
        await tab.wait_for_selector("#limits-state:has-text('is paused: this machine runs on battery')")
        assert "Its GPU has 61 °C and takes 180 W." in await tab.inner_text("#limits-state")
        assert (traffic.sent.bytes_per_s, paused) == (1e6, ["this machine runs on battery"])
        assert read_limits(settings) == Limits(upload=8, battery=False)
        await tab.fill("#limits input[name=upload]", "0.01")
        await tab.check("#limits input[name=battery]")
        await tab.click("#limits button")
        await tab.wait_for_selector("#limits-said:has-text('too small')")
        assert read_limits(settings) == Limits(upload=8, battery=False)
        write_limits(settings, Limits(hours="mon-sun 00:00-24:00"))  # as `skipstone limits` does
        await tab.wait_for_selector("#limits-state:has-text('at full speed')")
        assert (traffic.sent.bytes_per_s, paused[-1]) == (float("inf"), "over")
        assert [each for each in tab.complaints if "400" not in each] == []
    running.cancel()


async def test_many_viewers_are_refused_and_a_slow_one_holds_up_nobody() -> None:
    async with served(RunPage(), 0, quiet) as link:
        port = int(link.split(":")[2].split("/")[0])
        request = f"GET /pictures HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        viewers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]  # most never read on
        for _, writer in viewers:
            writer.write(request)
        heads = [await reader.readuntil(b"\r\n\r\n") for reader, _ in viewers]
        assert sum(b" 200 " in head for head in heads) == MOST_VIEWERS
        assert all(b" 200 " in head or b" 503 " in head for head in heads)
        for reader, _ in [each for each, head in zip(viewers, heads, strict=True) if b" 200 " in head][:1]:
            for _ in range(3):
                await reader.readuntil(b'"quiet"')
        await ended(*(writer for _, writer in viewers))
        while True:  # their places are free again
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            await ended(writer)
            if b" 200 " in head:
                break
            await asyncio.sleep(0.05)


async def test_a_port_in_use_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceExhausted, match="cannot serve the page on port"):
            async with served(RunPage(), taken.getsockname()[1], quiet):
                pass
