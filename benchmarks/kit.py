"""What the benchmarks share: options and JSON output, processes, swarms, a small run and its training loop."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, TypeVar

from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import SkipstoneError, StateError
from swarm.vocabulary.types import MicrobatchId, ModuleId, PeerId, RunId

if TYPE_CHECKING:
    from torch import nn

    from node.data.documents import Documents
    from node.data.packing import Microbatch
    from node.local_swarm.local_swarm import LocalSwarm
    from node.local_swarm.setup import Deployment, LocalSwarmOptions
    from node.model.optimizer import Accumulator, InnerOptimizer, StepFigures
    from node.observability.events import Event
    from node.solo.trainer import ChooseStages, WholeModel
    from tests.e2e.emulated import Spec

# What measured processes need not load (torch, and with `node` more than that) is imported in the functions.
ROOT: Final = Path(__file__).resolve().parent.parent
RUN: Final = RunId("0" * 64)
READER: Final = PeerId("reader")
PATIENCE_S: Final = 120.0
STARTS: Final = 4
START_S: Final = 30.0
Found = TypeVar("Found")


Measure = Callable[[Any], Any]
"""Takes the options and returns figures; may be a coroutine function."""


def run(doc: str | None, measure: Measure | Mapping[str, Measure], quick: Mapping[str, Any], **defaults: Any) -> None:
    """Parses options (by their defaults), measures and prints one JSON object.

    Args:
        measure: makes the figures; or one for each of the `--parts`, whose figures are under the part's name.
        quick: the values of `--quick`, which shows in seconds that the benchmark works.
        defaults: a tuple of words lists the choices, `Path` is an optional file or folder.
    """
    parts = {} if callable(measure) else {"parts": tuple(measure)}
    options = parsed(doc, quick, {**parts, **defaults}, sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `process` ends its children

    def done(one: Measure) -> Any:
        found = one(options)
        return asyncio.run(found) if inspect.iscoroutine(found) else found

    try:
        figures = done(measure) if callable(measure) else {part: done(measure[part]) for part in options.parts}
    except SkipstoneError as error:
        tell(f"error: {error}")
        sys.exit(error.exit_code)
    name, versions = Path(sys.argv[0]).stem, {"python": platform.python_version(), "torch": version("torch")}
    report = {
        "benchmark": name,
        "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), **versions},
        **figures,
    }
    print(json.dumps(report))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def parsed(doc: str | None, quick: Mapping[str, Any], defaults: Mapping[str, Any], words: Sequence[str]) -> Any:
    """The options given, then those of `--quick`, then the defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"type": type(default), "help": f"default: {default}"}
        if default is Path or default == [Path]:
            kind = {"type": Path, **({} if default is Path else {"nargs": "+"})}
        elif isinstance(default, bool):
            kind = {"action": "store_true"}
        elif isinstance(default, tuple | list):
            kind = {"type": type(default[0]), "nargs": "+", "help": f"default: {' '.join(map(str, default))}"}
            if isinstance(default, tuple):
                kind["choices"] = default
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, **kind)
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that the benchmark works")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    given = vars(parser.parse_args(words))
    usual = {name: None if default in (Path, [Path]) else default for name, default in defaults.items()}
    return argparse.Namespace(**{**usual, **(quick if given["quick"] else {}), **given})


@contextmanager
def folder(kept: Path | None, name: str) -> Iterator[Path]:
    """A new folder: of this name inside the kept one, or a temporary one."""
    with TemporaryDirectory(prefix=f"skipstone-{name}-") as temporary:
        made = (kept or Path(temporary)) / name
        made.mkdir(parents=True)
        yield made


def tell(*words: object) -> None:
    """Writes progress to standard error."""
    print(*words, file=sys.stderr, flush=True)


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known, None without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def medians(rows: Sequence[Mapping[str, Any]], keys: Iterable[str] | None = None) -> dict[str, Any]:
    """The median of each key over the rows that have a number for it."""
    return {key: median(row.get(key) for row in rows) for key in (rows[0] if keys is None else keys)}


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of pairs that were measured in the same turn."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def reached(curve: Sequence[Sequence[float]], column: int, loss: float, of: float) -> float | None:
    """Where a curve is first down to a loss (its last column), interpolated, as a share of `of`; None if never."""
    for before, at in pairwise(curve):
        if at[-1] <= loss:
            part = 0.0 if before[-1] <= loss else (before[-1] - loss) / (before[-1] - at[-1])
            return (before[column] + part * (at[column] - before[column])) / of
    return None


def curve_of(steps: int, points: int, step: Callable[[], object], look: Callable[[int], Found]) -> list[Found]:
    """Trains for these steps; what `look(steps done)` finds before them and at `points` equal distances."""
    wanted = {round(steps * point / points) for point in range(points + 1)}
    found = list[Found]()
    for number in range(steps + 1):
        if number:
            step()
        if number in wanted:
            found.append(look(number))
    return found


def rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


@contextmanager
def process(target: Any, *arguments: Any, grace_s: float = 0.0) -> Iterator[Connection]:
    """Runs `target(connection, *arguments)` in a fresh Python process until the block ends.

    Args:
        grace_s: the time in which it may end by itself, after its connection has. Its children end with it.
    """
    context = get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=_lead_group, args=(target, there, *arguments))
    child.start()
    there.close()  # a child that fails ends the connection
    try:
        yield here
    finally:
        here.close()
        child.join(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)
        child.kill()
        child.join()


def _lead_group(target: Any, *arguments: Any) -> None:
    os.setpgrp()  # not a session: Linux schedules sessions apart, which costs a hop 4 %
    try:
        target(*arguments)
    except* EOFError:  # the driver has ended the connection
        pass


def hear(connection: Connection, patience_s: float = PATIENCE_S) -> Any:
    """The next message. Raises TimeoutError when none comes."""
    if not connection.poll(patience_s):
        raise TimeoutError(f"a measured process has said nothing for {patience_s:.0f} s")
    return connection.recv()


@contextmanager
def started(start: Callable[[ExitStack], Found]) -> Iterator[Found | None]:
    """What `start` makes, for processes that sometimes hang at their start, as hivemind's do; None after four tries."""
    for attempt in range(1, STARTS + 1):
        with ExitStack() as processes:
            try:
                found = start(processes)
            except (TimeoutError, EOFError):
                tell(f"it did not start, try {attempt} of {STARTS}")
                continue
            yield found
            return
    yield None


def threads_of_each_peer() -> int:
    """Torch threads of each of two peers that share this machine's cores."""
    return max(1, (os.cpu_count() or 1) // 2)


def introduce(peers: Sequence[Connection]) -> None:
    """Sends the contacts of all peers to all, and waits until all are ready."""
    contacts = [hear(peer) for peer in peers]
    for peer in peers:
        peer.send(contacts)
    for peer in peers:
        hear(peer)


async def swarm_to_its_end(manifest: Manifest, options: LocalSwarmOptions) -> tuple[float, list[Event]]:
    """Runs a swarm until it has taken its steps; its tokens per second after the first step, and its events."""
    from node.local_swarm.local_swarm import LocalSwarm
    from node.observability.events import Step

    times, events = list[tuple[float, int]](), list[Any]()
    async with LocalSwarm(manifest, options) as nodes:
        async for event in nodes.events():
            events.append(event)
            if isinstance(event, Step):
                times.append((time.perf_counter(), event.tokens))
            if nodes.progress.is_over:
                nodes.request_stop()
    if len(times) < 2:
        raise RuntimeError(f"the swarm ended after {len(times)} steps: {nodes.progress}")
    return rate(times), events


def rate(times: Sequence[tuple[float, int]]) -> float:
    """Tokens per second between the first and the last step, from times and tokens so far."""
    (began, before), (ended, after) = times[0], times[-1]
    return (after - before) / max(ended - began, 1e-9)


async def all_serve(swarm: LocalSwarm, within_s: float = 240.0) -> None:
    """Waits until all nodes serve. Raises RuntimeError when one does not come up."""
    begun = time.monotonic()
    while any(peer.state != "serving" for peer in swarm.progress.peers.values()):
        waited_s = time.monotonic() - begun
        if swarm.ends or waited_s > within_s:
            states = ", ".join(f"{index} {peer.state}" for index, peer in sorted(swarm.progress.peers.items()))
            raise RuntimeError(f"not all nodes serve after {waited_s:.0f} s: {states}; {notes_of(swarm)}")
        await asyncio.sleep(0.2)


def emulated(spec: Spec) -> Deployment:
    """Where a node runs whose computations and links take the times of this specification."""
    from node.local_swarm.setup import Deployment

    return Deployment(command=(sys.executable, "-P", "-m", "tests.e2e.emulated", spec.to_json()))


def notes_of(swarm: LocalSwarm) -> str:
    return "the nodes say: " + ("; ".join(note.message for _, note in swarm.progress.notes) or "nothing")


def verdict(logs: Path) -> dict[str, object]:
    """Exit code and report of `skipstone check` on a folder of event logs."""
    command = [sys.executable, "-m", "skipstone", "check", str(logs), "--json"]
    checked = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=600)
    return {"exit_code": checked.returncode, "report": json.loads(checked.stdout or "null")}


def run_of(
    name: str,
    blocks: Sequence[int],
    *,
    hidden: int,
    sequence: int,
    rows: int,
    microbatches: int,
    heads: int = 4,
    feed_forward: int | None = None,
    model: Mapping[str, Any] | None = None,
    stages: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    seed: int = 1,
    sections: Mapping[str, Any] | None = None,
    **training: Any,
) -> Manifest:
    """A run of bytes; `microbatches` are those of an inner step, `training` other keys of that section."""
    width = {"vocabulary": 257, "hidden": hidden, "heads": heads, "kv_heads": heads, "sequence": sequence}
    return manifest_from_table(
        {
            "protocol": 2,
            "name": name,
            "seed": seed,
            "model": {**width, "feed_forward": feed_forward or 8 * hidden // 3, **(model or {})},
            "stages": {"blocks": list(blocks), **(stages or {})},
            "data": dict(data or {}),
            # Runs of a minute are as late as the others from the start.
            "training": {
                "rows": rows,
                "inner_tokens": microbatches * rows * sequence,
                "staleness_steps": 0,
                **training,
            },
            **(sections or {}),
        }
    )


def demo_run(name: str, blocks: Sequence[int], seed: int, **training: Any) -> Manifest:
    """The demo model in these stages on the standard library's source, with a constant learning rate and no end."""
    from node.local_swarm.default_manifest import default_manifest

    table = default_manifest(seed, name).model_dump(mode="json", exclude_none=True)
    table["stages"]["blocks"] = list(blocks)
    table["training"] |= {"staleness_steps": 0, **training}
    table["training"]["schedule"] |= {"kind": "constant", "total_steps": 1_000_000}
    return manifest_from_table(table)


def source_of(text: Path | None) -> str:
    """The manifest's `data.source`: a file or folder, else the standard library's modules."""
    return "python-stdlib" if text is None else f"path:{text.resolve()}"


def size_of(task: Any) -> dict[str, int]:
    """A task's sizes, as `run_of` takes them."""
    return {key: getattr(task, key) for key in ("hidden", "heads", "feed_forward", "sequence", "rows", "microbatches")}


class Solo:
    """A run in training by the product's own loop in one process, and its held-out text.

    Args:
        held_out: microbatches of held-out text, from the documents of `measured` if they are others.
        unscored: first tokens of each held-out document that are no labels.
    """

    def __init__(
        self,
        manifest: Manifest,
        held_out: int,
        choose: ChooseStages | None = None,
        documents: Documents | None = None,
        measured: Documents | None = None,
        unscored: int | None = None,
    ) -> None:
        import torch

        from node.data.feed import held_out_microbatches, open_documents
        from node.solo.trainer import SoloTrainer, WholeModel

        documents = documents or open_documents(manifest)
        self.texts = list(held_out_microbatches(manifest, held_out, measured or documents, unscored))
        self.model = WholeModel(manifest, torch.device("cpu"))
        self.trainer = SoloTrainer(manifest, self.model, documents, choose)

    def step(self) -> None:
        self.trainer.step(lambda: False)

    def loss(self, paths: Iterable[Sequence[int] | None] = (None,)) -> float:
        """Held-out loss in nats per token, the mean over the paths."""
        return statistics.fmean(loss_of(self.model, text, path) for path in paths for text in self.texts)


def loss_of(model: WholeModel, text: Microbatch, stages: Sequence[int] | None = None) -> float:
    """Loss of a microbatch in nats per label, on a path through `stages` (None: all)."""
    import torch

    with torch.no_grad():
        hidden = model.embedding(text.tokens.to(model.device), text.documents)
        for stack in model.path(text, stages):
            hidden = stack(hidden, text.documents)
        return text.per_label(float(model.head(hidden, text.labels.to(model.device)).item()))


def evaluate(loss: Callable[[Microbatch], float], microbatches: Iterable[Microbatch]) -> dict[str, Any]:
    """Loss, tokens and microbatches, in total and by route."""
    from node.network.loss_report import answer_of, held_out_loss

    texts = list(microbatches)
    losses = [(loss(text), text.scored) for text in texts]
    return answer_of(held_out_loss([text.route for text in texts], losses))


class Learner:
    """All modules of a run in one process, with their accumulators and inner optimizers, as the nodes have them."""

    def __init__(
        self, manifest: Manifest, optimizer: Callable[[Sequence[Accumulator]], InnerOptimizer] | None = None
    ) -> None:
        import torch

        from node.model.optimizer import Accumulator, InnerOptimizer
        from node.solo.trainer import WholeModel

        self.manifest = manifest
        self.model = WholeModel(manifest, torch.device("cpu"))
        self.modules: list[tuple[nn.Module, ...]] = [tuple(parts) for _, parts in self.model.modules()]
        self._sums = {part: Accumulator(part) for parts in self.modules for part in parts}
        make = optimizer or (lambda sums: InnerOptimizer(manifest, ModuleId(0), sums))
        self.optimizers = [make([self._sums[part] for part in parts]) for parts in self.modules]
        self._count = 0

    def add(self, microbatch: Microbatch, computed: tuple[float, Mapping[nn.Module, Any]] | None = None) -> float:
        """Adds a microbatch's gradients and returns its loss. Raises StateError when they are not finite."""
        from node.model.optimizer import Addition

        loss, gradients = computed or self.gradients(microbatch)
        name = MicrobatchId(READER, self._count)
        for part, of_part in gradients.items():
            if self._sums[part].add(name, microbatch.size, of_part) is not Addition.ADDED:
                raise StateError(f"training has diverged: loss {loss} in microbatch {self._count}")
        self._count += 1
        return loss

    def step(self, microbatches: Iterable[Microbatch] = ()) -> tuple[StepFigures, ...]:
        """Takes an inner step of every module with these microbatches, and those that were added before."""
        for microbatch in microbatches:
            self.add(microbatch)
        return tuple(optimizer.step() for optimizer in self.optimizers)

    def gradients(self, microbatch: Microbatch) -> tuple[float, Mapping[nn.Module, Any]]:
        return self.model.gradients(microbatch)
