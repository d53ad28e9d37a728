"""A run small enough for end-to-end tests on two cores, and what the tests ask of a swarm that trains it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from node.local_swarm.local_swarm import LocalSwarm
from node.observability.event_json import event_from_json
from node.observability.events import Event, NodeStatus, NodeSummary, Step
from protocol.manifest.manifest import Manifest, manifest_from_table

PATIENCE_S = 90.0


def small_run(
    text: Path,
    *,
    blocks: tuple[int, ...] = (0, 1, 1, 1),
    per_path: int | None = None,
    visit_ratio: float = 1.0,
    attention: str = "causal",
    labels: str = "all",
    **training: object,
) -> Manifest:
    """A byte-level model of `text` with a step of four microbatches."""
    return manifest_from_table(
        {
            "protocol": 2,
            "name": "small",
            "seed": 11,
            "model": {
                "vocabulary": 257,
                "hidden": 32,
                "heads": 4,
                "kv_heads": 2,
                "feed_forward": 64,
                "sequence": 32,
                "attention": attention,
            },
            "stages": {"blocks": blocks, "per_path": per_path, "visit_ratio": visit_ratio},
            "data": {"source": f"path:{text}", "held_out": 0.1, "labels": labels},
            "training": {
                "rows": 2,
                "inner_tokens": 256,
                "inner": {"learning_rate": 3e-3},
                "schedule": {"kind": "constant", "warmup_steps": 5, "total_steps": 1000},
                **training,
            },
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
        messages = [each for pair in zip(asked, answers, strict=True) for each in pair]
        lines.append(json.dumps({"messages": messages}))
    (folder / "talk.jsonl").write_text("\n".join(lines))
    return folder


def events_of(logs: Path) -> list[Event]:
    """The events of all nodes that have written their logs here, one node after the other."""
    return [event_from_json(line) for path in sorted(logs.iterdir()) for line in path.read_bytes().splitlines()]


class Watch:
    """Reads a swarm's events as they come, so that a test can wait for one and look at all of them afterwards."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self.seen: list[Event] = []
        self._events = swarm.events()

    async def until(self, wanted: Callable[[Event], bool]) -> Event:
        """The next event that is wanted."""
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
