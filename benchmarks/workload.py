"""What whole documents in microbatches of equal cost are worth: held-out loss, and tokens per second of a swarm.

`loss`: held-out nats a token at equal tokens, whole documents against one concatenated stream, in one process; both
read the same text in the same order and are measured on the same documents. `swarm`: a swarm of two hops in real
processes, whole documents of equal cost against concatenation with a mask and rows of a stream; steps wait (staleness
0), so that a microbatch that costs more than the others holds all up; arms in turns, medians of the ratios within a
round. With several `--replicas` a stage the devices are emulated: a visit takes what its documents cost. `python -m
benchmarks.workload node SPEC join ...` is a node of an arm.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import kit
from benchmarks.kit import median, median_ratio, run_of, swarm_to_its_end, tell
from benchmarks.packing import log_normal
from node.data.documents import Place as TextPlace
from node.data.feed import held_out_microbatches, open_documents
from node.data.packing import Cursor, DocumentPacker, _Block, _Stretch
from node.local_swarm.setup import LocalSwarmOptions, Place
from node.pipeline.runner import Job
from node.pipeline.worker import HopWorker
from node.solo.trainer import SoloTrainer, WholeModel, evaluate
from protocol.manifest.manifest import Manifest, quadratic_share
from swarm.pipeline.custody_events import Work
from swarm.workload.microbatch_sizes import Size
from swarm.workload.packing import Piece
from tests.e2e.emulated import lasting

BARS: Final = {"loss": 1.005, "concat": 1.10, "rows": 1.35}
FORWARD_S: Final = 4.0
"""Of a microbatch of rows on an emulated device; far above what it really takes here."""
FACTORS: Final = {Work.FORWARD: 1.0, Work.BACKWARD: 2.0, Work.REPLAY: 3.0}

# ---- loss ------------------------------------------------------------------------------------------------------------


def loss_run(options: Any, attention: str, seed: int) -> Manifest:
    hidden, sequence, rows, microbatches = (16, 32, 2, 1) if options.quick else (48, 512, 4, 2)
    step = rows * sequence * microbatches
    return run_of(
        "loss",
        [0, 2],
        seed=seed,
        hidden=hidden,
        sequence=sequence,
        rows=rows,
        microbatches=microbatches,
        model={"attention": attention},
        data={"source": "python-stdlib", "held_out": 0.05},
        inner={"learning_rate": 4e-3},
        schedule={"warmup_tokens": step * options.loss_steps // 20, "total_tokens": step * options.loss_steps},
    )


def held_out_loss(options: Any, attention: str, seed: int) -> float:
    manifest = loss_run(options, attention, seed)
    model = WholeModel(manifest, torch.device("cpu"))
    trainer = SoloTrainer(manifest, model, open_documents(manifest))
    while trainer.tokens < options.loss_steps * manifest.training.inner_tokens:
        trainer.step(lambda: False)
    texts = held_out_microbatches(loss_run(options, "documents", seed), 2 if options.quick else 40)
    return float(evaluate(model, texts)["loss"])


def measure_loss(options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {"documents": [], "causal": []}
    for seed in options.seeds:
        for arm, of in losses.items():
            of.append(held_out_loss(options, arm, seed))
            tell(f"loss, seed {seed}, {arm}: {of[-1]:.4f}")
    ratio = median_ratio(losses["documents"], losses["causal"])
    perplexity = math.exp((median(losses["documents"]) or 0) - (median(losses["causal"]) or 0))
    return {"losses": losses, "documents_over_causal": round(ratio, 4), "perplexity": round(perplexity, 4)}


# ---- a node of an arm ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spec:
    """How a data node packs, and the emulated device, if any."""

    concat: bool
    token_s: float = 0.0
    """Forward time of one token without attention; 0: the device is not emulated."""
    share: float = 0.0
    """`protocol.manifest.manifest.quadratic_share`."""
    tokens: int = 0
    """Of a microbatch that is rows of one stream."""
    sequence: int = 0
    window: int = 0
    """In-flight microbatches: a whole step, so that none waits for the window to be found."""

    def seconds(self, documents: tuple[int, ...]) -> float:
        """Forward time of a microbatch; rows see all that is before them."""
        lengths = documents or (self.sequence,) * (self.tokens // self.sequence)
        return self.token_s * sum(tokens + self.share * tokens**2 for tokens in lengths)

    @property
    def place(self) -> Place:
        command = (sys.executable, "-P", "-m", "benchmarks.workload", "node", json.dumps(asdict(self)))
        return Place(command=command)


class ConcatPacker(DocumentPacker):
    """Cuts the stream of documents wherever a microbatch is full, and masks between what is left of them."""

    def _packed(self, stretches: list[_Stretch], end: TextPlace) -> _Block:
        turns, turn, room = list[tuple[Piece, ...]](), list[Piece](), self._room.tokens
        for index, stretch in enumerate(stretches):
            start = 0
            while start < stretch.labels.size:
                stop = min(start + min(room, self._room.sequence), stretch.labels.size)
                turn.append(Piece(index, start, stop))
                room, start = room - (stop - start), stop
                if not room:
                    turns.append(tuple(turn))
                    turn, room = [], self._room.tokens
        if turn:
            turns.append(tuple(turn))
        return _Block(stretches, turns, Cursor(end))


def run_node(spec: Spec) -> None:
    """Runs `skipstone` with the arm's packer, and on a device that sleeps for the rest of the emulated time."""
    from node.__main__ import main as skipstone
    from node.data import feed

    def seconds_of(job: Job, put_off: int) -> float:
        return FACTORS[job.work] * spec.seconds(job.documents)

    def timed(self: HopWorker, size: Size, seconds: float) -> None:
        lasted = FACTORS[Work.REPLAY] * spec.seconds(size.documents)
        self._cost.add(size.tokens, size.squares, len(size.documents), lasted)

    if spec.concat:
        feed.DocumentPacker = ConcatPacker  # type: ignore[misc]
    if spec.token_s:
        HopWorker.compute = lasting(HopWorker.compute, seconds_of)  # type: ignore[method-assign]
        HopWorker._timed = timed  # type: ignore[method-assign]
        sys.argv += ["--window", str(spec.window)]
    skipstone()


# ---- swarm -----------------------------------------------------------------------------------------------------------


def swarm_run(options: Any, text: Path, attention: str) -> Manifest:
    return run_of(
        "workload",
        [0, 1, 1],
        **{key: getattr(options, key) for key in ("hidden", "sequence", "rows", "microbatches")},
        model={"attention": attention},
        data={"source": f"path:{text}"},
        inner_steps=1_000_000,
        round_seconds=1e6,
        staleness=options.staleness,
    )


def write_documents(folder: Path, count: int) -> Path:
    folder.mkdir()
    rng = random.Random(3)
    for number, length in enumerate(log_normal(count)):
        (folder / f"{number:05}.txt").write_bytes(bytes(rng.choices(b"abcdefghij klm\n", k=length)))
    return folder


def spec_of(manifest: Manifest, options: Any, *, concat: bool) -> Spec:
    if options.replicas == 1:
        return Spec(concat)
    tokens = options.rows * options.sequence
    unit = Spec(concat, 1.0, quadratic_share(manifest.model), tokens, options.sequence, options.microbatches)
    return replace(unit, token_s=FORWARD_S / unit.seconds(()))


def measure_swarm(options: Any) -> dict[str, Any]:
    found: dict[str, list[float]] = {"ours": [], "concat": [], "rows": []}
    swarm_options = LocalSwarmOptions(peers=1 + 2 * options.replicas, steps=options.steps, threads=1)
    with tempfile.TemporaryDirectory(prefix="skipstone-workload-") as folder:
        text = write_documents(Path(folder) / "text", options.documents)
        whole, rows = swarm_run(options, text, "documents"), swarm_run(options, text, "causal")
        for number in range(options.rounds):
            for arm, manifest in (("ours", whole), ("concat", whole), ("rows", rows)):
                place = spec_of(manifest, options, concat=arm == "concat").place
                rate, _ = asyncio.run(swarm_to_its_end(manifest, swarm_options, lambda index, at=place: at))
                found[arm].append(rate)
                tell(f"swarm, round {number + 1}, {arm}: {rate:.0f} tokens/s")
    ratios = {f"ours_over_{arm}": round(median_ratio(found["ours"], found[arm]), 3) for arm in ("concat", "rows")}
    return {"tokens_per_s": found, **ratios, "staleness": options.staleness, "replicas": options.replicas}


def measure(options: Any) -> dict[str, Any]:
    parts = {"loss": measure_loss, "swarm": measure_swarm}
    return {"bars": BARS, **{part: parts[part](options) for part in options.parts}}


def main() -> None:
    if sys.argv[1:2] == ["node"]:
        spec = Spec(**json.loads(sys.argv[2]))
        del sys.argv[1:3]
        run_node(spec)
        return
    swarm = {"hidden": 64, "sequence": 8192, "rows": 4, "microbatches": 8, "steps": 4, "rounds": 3, "documents": 6000}
    small = {"hidden": 16, "sequence": 64, "rows": 2, "microbatches": 2, "steps": 2, "rounds": 1, "documents": 200}
    quick = {"seeds": [1], "loss_steps": 3, "parts": ["loss"], **small}
    more = {"seeds": [1, 2, 3], "loss_steps": 300, "staleness": 0, "replicas": 1}
    kit.run(__doc__, measure, quick, parts=("loss", "swarm"), **more, **swarm)


if __name__ == "__main__":
    main()
