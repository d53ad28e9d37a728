"""A run small enough for end-to-end tests on two cores, and what the tests ask of a swarm that trains it."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from typer.testing import CliRunner

from node.__main__ import app
from node.checkpoint.folder import CheckpointFolder, gather_modules
from node.experts.router import BUCKETS, Router, StageTable, buckets, router_digest
from node.local_swarm.local_swarm import LocalSwarm
from node.local_swarm.setup import PlannedPeer
from node.observability.event_json import event_from_json
from node.observability.events import Event, NodeStatus, NodeSummary, Step
from node.solo.trainer import CheckpointPlan, train_solo
from node.start.cut_model import CutModel
from protocol.identity.keys import Identity
from protocol.manifest.manifest import Manifest, RoutingSection, manifest_from_table
from protocol.manifest.signing import sign_manifest

PATIENCE_S = 90.0


def small_run(
    text: Path,
    *,
    blocks: tuple[int, ...] = (0, 1, 1, 1),
    per_path: int | None = None,
    visit_ratio: float = 1.0,
    attention: str = "causal",
    labels: str = "all",
    is_open: bool = False,
    residual: int = 0,
    **training: object,
) -> Manifest:
    """A byte-level model of `text` with a step of four microbatches."""
    model = {"vocabulary": 257, "hidden": 32, "heads": 4, "kv_heads": 2, "feed_forward": 64, "sequence": 32}
    schedule = {"kind": "constant", "warmup_steps": 5, "total_steps": 1000}
    learning = {"rows": 2, "inner_tokens": 256, "staleness_steps": 0, "inner": {"learning_rate": 3e-3}}
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "small",
            "seed": 11,
            "model": {**model, "attention": attention, "residual": residual, "token_rank": residual // 4},
            "stages": {"blocks": blocks, "per_path": per_path, "visit_ratio": visit_ratio},
            "data": {"source": f"path:{text}", "held_out": 0.1, "labels": labels, "open": is_open},
            "training": {**learning, "schedule": schedule, **training},
        }
    )


def write_text(folder: Path) -> Path:
    """Forty documents that repeat themselves enough to be learnt from."""
    folder.mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * 7 + k * k) % 23} and" for k in range(120))
        (folder / f"{number:02}.txt").write_text(words)
    return folder


def write_documents(folder: Path) -> Path:
    """Two hundred documents, most of them shorter than a row of `small_run`."""
    folder.mkdir()
    for number in range(200):
        words = " ".join(f"word{(number + k * k) % 23}" for k in range(1 + number * number % 9))
        (folder / f"{number:03}.txt").write_text(words)
    return folder


def write_conversations(folder: Path) -> Path:
    """Two hundred conversations of one or two questions, whose answers can be learnt."""
    folder.mkdir()
    lines = []
    for number in range(200):
        asked = [{"role": "user", "content": f"{'What is ' * (number % 4)}{number}?"} for _ in range(1 + number % 2)]
        answers = [{"role": "assistant", "content": f"word{(number + k) % 5} and so on"} for k in range(len(asked))]
        lines.append(json.dumps({"messages": [each for pair in zip(asked, answers, strict=True) for each in pair]}))
    (folder / "talk.jsonl").write_text("\n".join(lines))
    return folder


def peers_of(node: PlannedPeer, modules: int) -> set[str]:
    """The peers of one process: each module has a key of its own."""
    identity = Identity.load(node.identity_path)
    return {identity.peer, *(identity.for_module(number).peer for number in range(1, modules))}


def events_of(logs: Path) -> list[Event]:
    """The events of all nodes that have written their logs here, one node after the other."""
    return [event_from_json(line) for path in sorted(logs.iterdir()) for line in path.read_bytes().splitlines()]


async def skipstone(*arguments: str, within_s: float = PATIENCE_S) -> tuple[int | None, bytes, str]:
    """Exit code, standard output and standard error of a command."""
    program, pipe = (sys.executable, "-P", "-m", "skipstone", *arguments), asyncio.subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = await asyncio.create_subprocess_exec(*program, stdout=pipe, stderr=pipe, env=environment)
    output, errors = await asyncio.wait_for(process.communicate(), within_s)
    return process.returncode, output, errors.decode()


def checked(logs: Path) -> dict[str, Any]:
    """The report of `skipstone check` on these logs, in which nothing counts twice or is missing."""
    report: dict[str, Any] = json.loads(CliRunner().invoke(app, ["check", str(logs), "--json"]).stdout)
    assert report["ok"], report["violations"]
    return report


class Watch:
    """Reads a swarm's events as they come, so that a test can wait for one and look at all of them afterwards."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self.seen: list[Event] = []
        self._events = swarm.events()

    async def until(self, wanted: Callable[[Event], bool]) -> Event:
        try:
            async with asyncio.timeout(PATIENCE_S):
                async for event in self._events:
                    self.seen.append(event)
                    if wanted(event):
                        return event
        except TimeoutError:
            raise AssertionError(f"it did not come within {PATIENCE_S:.0f} s, after {self.seen[-30:]}") from None
        raise AssertionError("the swarm ended before it came")

    async def under_way(self, swarm: LocalSwarm) -> None:
        """Until every node serves and five steps are done: steps begin before all replicas of a stage are there."""
        waited_for = {peer.peer for peer in swarm.peers}
        while not all(self.states(peer)[-1:] == ["serving"] for peer in waited_for):
            await self.until(lambda event: isinstance(event, NodeStatus) and event.state == "serving")
        if swarm.progress.step < 5:
            await self.step(5)

    async def step(self, number: int) -> Event:
        return await self.until(lambda event: isinstance(event, Step) and event.step >= number)

    async def to_the_end(self, swarm: LocalSwarm) -> None:
        """Follows the swarm until its steps are done and every node has stopped."""
        async with asyncio.timeout(PATIENCE_S):
            async for event in self._events:
                self.seen.append(event)
                if swarm.progress.is_over:
                    swarm.request_stop()

    def states(self, peer: str) -> list[str]:
        return [event.state for event in self.seen if isinstance(event, NodeStatus) and event.peer == peer]

    def losses(self) -> list[float]:
        return [event.loss for event in self.seen if isinstance(event, Step)]

    def summaries(self) -> list[NodeSummary]:
        return [event for event in self.seen if isinstance(event, NodeSummary)]


def solo_losses(
    manifest: Manifest, folder: Path, steps: int, *, router: Router | None = None, start: CutModel | None = None
) -> list[float]:
    """The losses of so many steps, after which the state is saved in the folder."""
    losses: list[float] = []
    signed = sign_manifest(manifest, Identity.generate())
    torch.set_num_threads(1)
    train_solo(
        manifest,
        steps=steps,
        device=torch.device("cpu"),
        on_event=lambda event: losses.append(event.loss) if isinstance(event, Step) else None,
        router=router,
        start=start,
        saves=CheckpointPlan(CheckpointFolder(folder, signed.run, signed.text)),
    )
    return losses


def assert_same_parameters(manifest: Manifest, one: Path, other: Path) -> None:
    swarms, solos = gather_modules(one), gather_modules(other)
    for module in manifest.modules():
        ours, theirs = swarms.module(module), solos.module(module)
        assert ours.keys() == theirs.keys()
        for parameter, value in ours.items():
            torch.testing.assert_close(
                value, theirs[parameter], rtol=0, atol=1e-5, msg=lambda why, name=parameter: f"{name}: {why}"
            )


ALPHABETS: Final = ("abcdef", "ghijkl", "mnopqr", "stuvwx")
OF_EACH: Final = 20
DOCUMENT_BYTES: Final = 31


def run_of_experts(folder: Path, experts: tuple[int, ...] = (2, 2)) -> tuple[Manifest, Router]:
    """Writes equally many documents of each route, equally long, and makes a manifest and a router of them."""
    folder.mkdir()
    for route, letters in _letters(experts).items():
        for number in range(OF_EACH):
            words = "".join(letters[(number + k * k) % len(letters)] for k in range(DOCUMENT_BYTES))
            (folder / f"{''.join(map(str, route))}{number:02}.txt").write_text(words)
    router = _router_by_letters(experts)
    manifest = small_run(folder, blocks=(0, *(1 for _ in experts)), inner_steps=4, attention="documents")
    changes = {
        "stages": manifest.stages.model_copy(update={"experts": (1, *experts)}),
        "data": manifest.data.model_copy(update={"held_out": 0.0}),
        "routing": RoutingSection(router=router_digest(router.to_bytes()), prefix=router.prefix),
    }
    return manifest.model_copy(update=changes), router


def _letters(experts: tuple[int, ...]) -> dict[tuple[int, ...], str]:
    return dict(zip(product(*map(range, experts)), ALPHABETS, strict=True))


def _router_by_letters(experts: tuple[int, ...]) -> Router:
    """The router that sends each document to the route whose letters it has."""
    entries = [np.zeros((count, BUCKETS), dtype=np.int8) for count in experts]
    for route, letters in _letters(experts).items():
        pairs = [[ord(one), ord(other)] for one in letters for other in letters]
        found = np.concatenate([buckets(np.array(pair, dtype=np.int64)) for pair in pairs])
        for stage, expert in enumerate(route):
            entries[stage][expert, found] = 1
    tables = (StageTable(of, np.zeros(len(of), dtype=np.int32), (1 / len(of),) * len(of)) for of in entries)
    return Router(tuple(tables), prefix=16)


LAUNCHED, HOME, LOST = "launched", "home", "lost"


@dataclass(frozen=True, slots=True)
class FlightMark:
    at: float
    kind: str
    peers: tuple[str, ...]
    measured: int


class FlightWriter:
    """Appends marks to a file; each is there as soon as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, kind: str, peers: tuple[str, ...], measured: int) -> None:
        mark = FlightMark(time.monotonic(), kind, peers, measured)
        self._file.write(json.dumps(asdict(mark), separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


def read_flights(path: Path) -> list[FlightMark]:
    """The marks that are there by now: none before the first, and not the one that is just being written."""
    tables = map(json.loads, whole_lines(path))
    return [FlightMark(table["at"], table["kind"], tuple(table["peers"]), table["measured"]) for table in tables]


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that another process writes: none before it has begun, and not the one that is half there."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
