"""The server of a run's page: for browsers on this machine only, with a new picture every few seconds."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from mimetypes import guess_type
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

from node.cli.views.output import plain_line
from node.cli.views.text import counted, harmless, peer_name
from node.concurrency.task_groups import background
from node.observability.events import Abandoned, Event, Note, Waiting
from node.observability.status import PeerStatus, SwarmStatus
from node.observability.typed_json import to_json
from protocol.libp2p.child_process import child_environment
from swarm.vocabulary.errors import ConfigError, ResourceExhausted, StateError, Unreachable

if TYPE_CHECKING:
    from aiohttp import web

    from node.network.client import Statuses

PORT: Final = 8420
LOOPBACK: Final = "127.0.0.1"
WHERE: Final = "The run's page, for this machine only:\n\n  {}\n"
MOST_VIEWERS: Final = 16
SAMPLE_S: Final = 300.0
MOST_PROMPT: Final = 500  # Characters
SECRET: Final = "X-Skipstone-Secret"  # noqa: S105 - the name of a header
FILES: Final = ("index.html", "page.js", "page.css", "uplot.js", "uplot.css", "icon.svg")
# Only our own files, and no page may show ours in a frame.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


GONE_S: Final = 120.0  # Time for which a peer that has gone is shown
MOST_GONE: Final = 32
MOST_HAPPENED: Final = 40
MOST_PEERS: Final = 256

Level = Literal["good", "info", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Happening:
    unix_s: float
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer that is no longer announced."""

    peer: str
    module: str
    unix_s: float


@dataclass(frozen=True, slots=True)
class Picture:
    """A run at one moment. `own`: peers of the node that shows the page; empty for a visitor."""

    status: SwarmStatus
    unix_s: float
    own: tuple[str, ...] = ()
    gone: tuple[Gone, ...] = ()
    happened: tuple[Happening, ...] = ()  # Latest last


def next_picture(before: Picture | None, status: SwarmStatus, own: tuple[str, ...], unix_s: float) -> Picture:
    """Combines a status with the changes since the last picture."""
    status = replace(status, peers=status.peers[:MOST_PEERS])
    if before is None:
        return Picture(status, unix_s, own)
    now = {peer.peer: peer for peer in status.peers}
    lost = [Gone(p.peer, p.module or "-", unix_s) for p in before.status.peers if p.peer not in now and p.module]
    still = [gone for gone in before.gone if gone.peer not in now and unix_s - gone.unix_s < GONE_S]
    happened = [Happening(unix_s, *each) for each in _changes(before.status, status)]
    return Picture(status, unix_s, own, (*still, *lost)[-MOST_GONE:], (*before.happened, *happened)[-MOST_HAPPENED:])


def _changes(before: SwarmStatus, now: SwarmStatus) -> Iterator[tuple[Level, str]]:
    """Yields a line for each peer that came, moved, fell silent or left, and for each round and unserved module."""
    old = {peer.peer: peer for peer in before.peers}
    for peer in now.peers:
        yield from _changes_of(old.pop(peer.peer, None), peer)
    for peer in old.values():
        if peer.module is not None:
            yield "bad", f"{_name(peer)} has gone"
    for module in sorted(set(now.waiting_for) - set(before.waiting_for)):
        yield "bad", f"no peer serves module {harmless(module)}"
    for module in sorted(set(before.waiting_for) - set(now.waiting_for)):
        yield "good", f"module {harmless(module)} is served again"
    earlier = _foremost(before)
    for module, peer in _foremost(now).items():
        last = peer.said.last_round
        if last is not None and last.members > 1 and module in earlier and peer.round > earlier[module].round:
            yield "info", f"module {harmless(module)}: round {peer.round} of {counted(last.members, 'peer')}"


def _foremost(status: SwarmStatus) -> dict[str, PeerStatus]:
    """Returns the replica of each module with the latest round, so that a late one does not report it again."""
    return {p.module: p for p in sorted(status.peers, key=lambda peer: peer.round) if p.answered and p.module}


def _changes_of(before: PeerStatus | None, peer: PeerStatus) -> Iterator[tuple[Level, str]]:
    if before is None:
        yield "good", f"{_name(peer)} has joined"
        return
    if peer.module != before.module and peer.module is not None:
        yield "info", f"{peer_name(peer.peer)} serves module {harmless(peer.module)} now"
    if before.answered is not None and peer.answered is None:
        yield "bad", f"{_name(peer)} does not answer"
    if before.answered is None and peer.answered is not None:
        yield "good", f"{_name(peer)} answers again"
    for said in set(peer.said.accused) - set(before.said.accused):
        yield "warning", f"{_name(peer)} excludes {peer_name(said.peer)} from rounds: {harmless(said.why)}"


def _name(peer: PeerStatus) -> str:
    return f"{peer_name(peer.peer)} of module {harmless(peer.module or '-')}"


class RunPage:
    """State of the page: the latest picture, the waiting browsers, and its `verbs`, the actions that it may request."""

    def __init__(self, link: Callable[[], str] | None = None, **verbs: Callable[[], None]) -> None:
        self.link, self._verbs = link, verbs  # Link of the run whose model continues texts
        self.standing: Callable[[], object] = lambda: None  # The node's limits
        self.limit: Callable[[Mapping[str, Any]], None] | None = None  # Changes some of them
        self._sampling = asyncio.Lock()
        self._picture: Picture | None = None
        self._encoded = b""
        self._viewers: set[asyncio.Event] = set()
        self._watched = asyncio.Event()
        self.secret = secrets.token_urlsafe(16)

    def emit(self, event: Event) -> None:
        """Shows a message of this node (`node.observability.events.EventSink`)."""
        if self._picture is not None and isinstance(event, Note | Waiting | Abandoned):
            level = event.level if isinstance(event, Note) else "warning"
            happening = Happening(time.time(), "bad" if level == "error" else level, plain_line(event) or "")
            self._show(replace(self._picture, happened=(*self._picture.happened, happening)[-MOST_HAPPENED:]))

    async def status(self) -> SwarmStatus:
        """Waits for the next status of the run. Raises TimeoutError."""
        changed = asyncio.Event()
        self._viewers.add(changed)
        self._watched.set()
        try:
            await asyncio.wait_for(changed.wait(), 20.0)
        finally:
            self._viewers.discard(changed)
        if self._picture is None:  # its peers do not answer yet
            raise TimeoutError
        return self._picture.status

    async def follow(self, statuses: Statuses, own: Callable[[], tuple[str, ...]]) -> None:
        """Queries the run's peers while a browser or Prometheus waits. `own`: peers of this process."""
        while True:
            await self._watched.wait()
            try:
                async with aclosing(statuses()) as seen:
                    async for status in seen:
                        self._show(next_picture(self._picture, status, own(), time.time()))
                        if not self._viewers:  # a visitor's session is slow to open: keep it for the next scrape
                            self._watched.clear()
                            await asyncio.wait_for(self._watched.wait(), 60.0)
            except TimeoutError:
                continue
            except Unreachable as error:  # its peers may only be starting
                self._send({"unreachable": str(error)})

    def _show(self, picture: Picture) -> None:
        self._picture = picture
        self._send(to_json(picture) | {"verbs": sorted(self._verbs), "limits": to_json(self.standing())})

    def _send(self, shown: dict[str, Any]) -> None:
        self._encoded = b"data: " + json.dumps(shown, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
        for viewer in self._viewers:
            viewer.set()

    async def pictures(self, request: web.Request) -> web.StreamResponse:
        """Streams pictures as server-sent events. A slow browser misses some."""
        from aiohttp import web

        if len(self._viewers) >= MOST_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_VIEWERS} browsers watch this page already")
        response = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        changed = asyncio.Event()
        self._viewers.add(changed)
        self._watched.set()
        try:
            await response.prepare(request)
            await response.write(self._encoded or b": nothing yet\n\n")
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), 15.0)
                sent = self._encoded if changed.is_set() else b": alive\n\n"  # a closed browser shows by an error
                changed.clear()
                await response.write(sent)
        except ConnectionError:
            return response
        finally:
            self._viewers.discard(changed)

    async def ask(self, request: web.Request) -> web.Response:
        """Runs a verb. The secret is in the link that the node printed, so other users and pages do not know it."""
        from aiohttp import web

        verb = self._verbs.get(request.match_info["verb"])
        if verb is None:
            raise web.HTTPNotFound
        self._check_secret(request)
        verb()
        return web.Response(status=204)

    async def change(self, request: web.Request) -> web.Response:
        """Changes limits of the node: a JSON object of some of them by name."""
        from aiohttp import web

        self._check_secret(request)
        if self.limit is None:
            raise web.HTTPNotFound(text="this page can change no limits")
        try:
            self.limit(await request.json())
        except (ConfigError, ValueError) as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        if self._picture is not None:
            self._show(self._picture)
        return web.Response(status=204)

    async def sample(self, request: web.Request) -> web.Response:
        """Continues a text by the model of the run's last rounds."""
        from aiohttp import web

        self._check_secret(request)
        if self.link is None or self._sampling.locked():
            raise web.HTTPServiceUnavailable(text="the model is being read for another text")
        async with self._sampling:
            try:
                return web.Response(text=await sampled(self.link(), (await request.text())[:MOST_PROMPT]))
            except StateError as error:
                raise web.HTTPServiceUnavailable(text=str(error)) from None

    def _check_secret(self, request: web.Request) -> None:
        from aiohttp import web

        if not hmac.compare_digest(request.headers.get(SECRET, "").encode(), self.secret.encode()):
            raise web.HTTPForbidden(text="open the page by the link that the node printed")


async def sampled(link: str, prompt: str) -> str:
    """Returns a text and how the model continues it. A large model harms only the new process. Raises StateError."""
    words = ("--tokens", "120", "--device", "cpu", "--json", "--", link, prompt)
    command, pipe = (sys.executable, "-P", "-m", "skipstone", "generate", *words), asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=child_environment(os.environ)
    )
    try:
        async with asyncio.timeout(SAMPLE_S):
            found, said = await process.communicate()
    except TimeoutError:
        raise StateError(f"the model was not read within {SAMPLE_S:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        raise StateError(said.decode(errors="replace")[-MOST_PROMPT:])
    return prompt + str(json.loads(found)["text"])


@asynccontextmanager
async def served(
    page: RunPage, port: int, statuses: Statuses, own: Callable[[], tuple[str, ...]] = tuple
) -> AsyncIterator[str]:
    """Serves the page on this machine within the block; yields its link. Raises ResourceExhausted."""
    from aiohttp import web

    folder = Path(__file__).parent / "page"
    files = {
        f"/{name}".removesuffix("index.html"): (guess_type(name)[0], (folder / name).read_bytes()) for name in FILES
    }
    hosts: set[str] = set()

    async def file(request: web.Request) -> web.Response:
        kind, content = files[request.path]
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=HEADERS)

    async def scrape(request: web.Request) -> web.Response:
        try:
            text = metrics(await page.status(), own())
        except TimeoutError:
            raise web.HTTPServiceUnavailable(text="the run's peers do not answer") from None
        return web.Response(body=text, headers=HEADERS | {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok\n", headers=HEADERS)

    @web.middleware
    async def own_host(request: web.Request, handler: Any) -> Any:
        # A page of another site can reach this port by a name that it made point here, but cannot forge these.
        own = f"http://{request.host}"
        if request.host not in hosts or request.headers.get("Origin", own) != own:
            raise web.HTTPForbidden(text="this page answers only to its own address")
        return await handler(request)

    app = web.Application(middlewares=[own_host], client_max_size=1024)
    app.add_routes([web.get(place, file) for place in files])
    gets = {"/pictures": page.pictures, "/metrics": scrape, "/healthz": health}
    app.add_routes([web.get(place, handler) for place, handler in gets.items()])
    app.add_routes([web.post("/ask/{verb}", page.ask), web.post("/limits", page.change)])
    app.add_routes([web.post("/sample", page.sample)])
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, port)
        try:
            await site.start()
        except OSError as error:
            hint = "Choose another one, or 0 for a free one."
            raise ResourceExhausted(f"cannot serve the page on port {port}: {error.strerror}", hint=hint) from error
        bound = runner.addresses[0][1]
        hosts |= {f"{host}:{bound}" for host in (LOOPBACK, "localhost")}
        async with background(page.follow(statuses, own)):
            yield f"http://{LOOPBACK}:{bound}/#{page.secret}"
    finally:
        await runner.cleanup()


def metrics(status: SwarmStatus, own: tuple[str, ...]) -> bytes:
    """Returns the text of a scrape: the run, and the peers of this node; for a visitor, all peers."""
    from prometheus_client import generate_latest

    peers = [peer for peer in status.peers if peer.answered is not None and (not own or peer.peer in own)]
    families: Any = SimpleNamespace(collect=lambda: (*_of_run(status), *_of_peers(peers)))
    return generate_latest(families)


def _of_run(run: SwarmStatus) -> Iterator[Any]:
    from prometheus_client.core import GaugeMetricFamily

    for name, about, value in (
        ("loss", "Training loss in nats per token", run.loss),
        ("step", "Steps of the foremost data node", run.step),
        ("run_tokens_per_second", "Tokens that the run trains on per second", run.tokens_per_s),
        ("peers", "Peers that host a module", sum(peer.module is not None for peer in run.peers)),
        ("modules_without_peer", "Modules that no peer serves", len(run.waiting_for)),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"skipstone_{name}", about, value=value)


def _of_peers(peers: list[PeerStatus]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def moved(peer: PeerStatus, way: str) -> int:
        return sum(getattr(each, f"{way}_bytes") for each in (peer.said.traffic or {}).values())

    def busy_s(peer: PeerStatus) -> float:
        return 0.0 if peer.said.compute is None else peer.said.compute.busy_s

    for kind, name, about, of in (
        (CounterMetricFamily, "tokens", "Tokens in accumulated microbatches", lambda p: p.said.tokens),
        (CounterMetricFamily, "inner_steps", "Inner steps", lambda p: p.said.steps),
        (CounterMetricFamily, "microbatches", "Gradients added", lambda p: p.said.accumulated),
        (CounterMetricFamily, "rounds", "Averaging rounds", lambda p: p.said.round),
        (CounterMetricFamily, "busy_seconds", "Time in which the device computed", busy_s),
        (CounterMetricFamily, "sent_bytes", "Bytes sent on links", lambda p: moved(p, "sent")),
        (CounterMetricFamily, "received_bytes", "Bytes received on links", lambda p: moved(p, "received")),
        (GaugeMetricFamily, "tokens_per_second", "Tokens per second", lambda p: p.said.tokens_per_s),
        (GaugeMetricFamily, "slots", "Slots for microbatches", lambda p: p.slots),
        (GaugeMetricFamily, "free_slots", "Free slots", lambda p: p.free_slots),
        (GaugeMetricFamily, "serving", "1 while the module is served", lambda p: float(p.state == "serving")),
    ):
        family = kind(f"skipstone_{name}", about, labels=("module", "peer"))
        for peer in peers:
            family.add_metric((str(peer.module or "-")[:16], peer.peer[:64]), of(peer))
        yield family
