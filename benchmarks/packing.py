"""Packing of documents into microbatches: ours, concatenation with a document mask, and WLB-LLM's outlier queues.

`balance`: documents (the standard library's modules by their bytes, and log-normal lengths) are drawn in a seeded order
until there are `--microbatches` of at most T tokens, of which at most S attend to each other. `ours` is what a data
node packs; `concat` one stream, cut every T tokens; `queues`: documents longer than a quarter of S wait until there is
one for each of a batch's 8 microbatches; a batch is packed by cost, the longest first (arXiv:2503.17924, section 4.2).
A document costs d + r d^2, r that of a model of this width. `max_over_mean`: over all runs of 8 microbatches, the
largest cost over the mean one; `cv2`: squared coefficient of variation of all costs; `padding`: share of T that is
empty; `cut`: share of the documents that fit into S but were cut; `ms_a_block`: the longest processor time (best of
three) of packing 64 microbatches or a million tokens.

`loss`: held-out nats a token at equal tokens, whole documents against one concatenated stream, in one process.
"""

import math
import random
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import Solo, evaluate, loss_of, median, median_ratio, run_of, tell
from node.data.packing import BLOCK_MICROBATCHES, MOST_DOCUMENTS, tokens_of_block, tokens_of_last
from protocol.manifest.manifest import Manifest, quadratic_share
from swarm.workload.packing import Capacity, pack

WINDOW: Final = 8
QUEUES: Final = (0.25, 0.5, 0.75)  # documents longer than these shares of S are outliers of one queue each
SEED: Final = 5
BARS: Final = {"max_over_mean": 1.04, "cv2": 0.002, "padding": 0.02, "ms_a_block": 20.0, "documents_over_causal": 1.005}
Packed = tuple[int, ...]  # the lengths of a microbatch's documents and pieces


@dataclass(frozen=True, slots=True)
class Task:
    """Document lengths, S, T, the quadratic share of a document's cost, and how many microbatches to pack."""

    lengths: Sequence[int]
    sequence: int
    tokens: int
    share: float
    microbatches: int

    def stream(self) -> Iterator[int]:
        """Lengths, in a new order again and again."""
        rng, order = random.Random(SEED), list(self.lengths)
        while True:
            rng.shuffle(order)
            yield from order

    def cost(self, packed: Packed) -> float:
        return sum(length + self.share * length * length for length in packed)


@dataclass(frozen=True, slots=True)
class Arm:
    """What an arm has packed."""

    packed: list[Packed]
    cut: float
    ms_a_block: float


def ours(task: Task) -> Arm:
    """As a data node's packer does, without the text."""
    budget = tokens_of_block(task.tokens)
    room, level = Capacity(task.sequence, task.tokens, task.share), 0.0
    stream, packed, longest_s = task.stream(), list[Packed](), 0.0
    waiting = deque[tuple[int, bool]]()  # documents that have been read, and whether they are rests of one
    while len(packed) < task.microbatches:
        read, left, last = list[tuple[int, bool]](), budget, waiting.popleft() if waiting else (next(stream) + 1, False)
        while last[0] <= left:
            read.append(last)
            left -= last[0]
            if len(read) == MOST_DOCUMENTS:
                left = min(left, tokens_of_last(budget - left, task.tokens))
            last = waiting.popleft() if waiting else (next(stream) + 1, False)
        length, is_rest = last
        whole, rest = list(read), last
        taken = left - left % task.sequence if left > task.sequence else left
        if (is_rest or length > task.sequence) and 2 * taken >= task.sequence:
            whole.append((taken, is_rest))
            rest = length - taken, True
        cut = [at for at, (tokens, is_rest) in enumerate(whole) if is_rest or tokens > task.sequence]
        chance = partial(shuffled, len(packed))
        found, seconds = _timed(partial(pack, [tokens for tokens, _ in whole], cut, room, level, chance))
        longest_s, level = max(longest_s, seconds), found.level
        waiting.appendleft(rest)
        packed += [tuple(piece.stop - piece.start for piece in chosen) for chosen in found.microbatches]
    return Arm(packed, 0.0, 1000 * longest_s)


def shuffled(key: int, count: int) -> list[int]:
    return random.Random(f"{SEED}:{key}").sample(range(count), count)


def concat(task: Task) -> Arm:
    """One stream, cut every T tokens and, within them, every S tokens of one document."""
    packed, cut, fitting, room = list[Packed](), 0, 0, task.tokens
    current: list[int] = []
    begun = time.perf_counter()
    for length in task.stream():
        left = length + 1
        fits = left <= task.sequence
        fitting += fits
        cut += fits and left > room
        while left > 0:
            taken = min(left, room, task.sequence)
            current.append(taken)
            left, room = left - taken, room - taken
            if not room:
                packed.append(tuple(current))
                current, room = [], task.tokens
        if len(packed) >= task.microbatches:
            break
    seconds = (time.perf_counter() - begun) * BLOCK_MICROBATCHES / len(packed)
    return Arm(packed, cut / max(1, fitting), 1000 * seconds)


def queues(task: Task) -> Arm:
    """Outlier queues before batches of 8 microbatches; what does not fit waits for the next batch."""
    bounds = [share * task.sequence for share in QUEUES]
    outliers: list[list[int]] = [[] for _ in bounds]
    packed, batch, longest_s = list[Packed](), list[int](), 0.0
    for length in _whole_pieces(task):
        queue = max((place for place, bound in enumerate(bounds) if length > bound), default=None)
        if queue is None:
            batch.append(length)
        else:
            outliers[queue].append(length)
            if len(outliers[queue]) >= WINDOW:
                batch += outliers[queue]
                outliers[queue] = []
        if sum(batch) < WINDOW * task.tokens:
            continue
        (made, batch), seconds = _timed(partial(_batch, batch, task))
        longest_s = max(longest_s, seconds)
        packed += made
        if len(packed) >= task.microbatches:
            break
    return Arm(packed, 0.0, 1000 * longest_s * BLOCK_MICROBATCHES / WINDOW)


def _whole_pieces(task: Task) -> Iterator[int]:
    for length in task.stream():
        for at in range(0, length + 1, task.sequence):
            yield min(length + 1 - at, task.sequence)


def _batch(lengths: list[int], task: Task) -> tuple[list[Packed], list[int]]:
    """Puts the longest first into the cheapest with room; returns the microbatches and the rest."""
    bins: list[list[int]] = [[] for _ in range(WINDOW)]
    costs, tokens, left = [0.0] * WINDOW, [0] * WINDOW, list[int]()
    for length in sorted(lengths, reverse=True):
        fitting = [place for place in range(WINDOW) if tokens[place] + length <= task.tokens]
        if not fitting:
            left.append(length)
            continue
        place = min(fitting, key=costs.__getitem__)
        bins[place].append(length)
        tokens[place] += length
        costs[place] += task.cost((length,))
    return [tuple(found) for found in bins if found], left


ARMS: Final[dict[str, Callable[[Task], Arm]]] = {"ours": ours, "concat": concat, "queues": queues}


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the shortest processor time of three."""
    seconds = []
    for _ in range(3):
        begun = time.thread_time()
        found = work()
        seconds.append(time.thread_time() - begun)
    return found, min(seconds)


def figures(arm: Arm, task: Task) -> dict[str, float]:
    costs = [task.cost(one) for one in arm.packed]
    runs = [costs[start : start + WINDOW] for start in range(max(1, len(costs) - WINDOW + 1))]
    mean = math.fsum(costs) / len(costs)
    return {
        "max_over_mean": round(max(max(run) * len(run) / math.fsum(run) for run in runs), 4),
        "cv2": round(math.fsum((cost - mean) ** 2 for cost in costs) / len(costs) / mean**2, 6),
        "padding": round(1 - sum(map(sum, arm.packed)) / len(arm.packed) / task.tokens, 4),
        "cut": round(arm.cut, 4),
        "ms_a_block": round(arm.ms_a_block, 2),
    }


def standard_library() -> list[int]:
    """Bytes of this Python's modules, without tests and what is installed."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"test", "tests", "site-packages", "dist-packages"}
    files = (path for path in sorted(root.rglob("*.py")) if not excluded & set(path.relative_to(root).parts))
    return [size for path in files if (size := path.stat().st_size)]


def log_normal(count: int = 20_000) -> list[int]:
    rng = random.Random(1)
    return [max(1, int(rng.lognormvariate(6.3, 1.3))) for _ in range(count)]


SETTINGS: Final[tuple[tuple[str, Callable[[], list[int]], int, int], ...]] = (
    ("standard library, S 4K, T 16K", standard_library, 4096, 4 * 4096),
    ("standard library, S 16K, T 64K", standard_library, 16_384, 4 * 16_384),
    ("log-normal, S 2K, T 8K", log_normal, 2048, 4 * 2048),
    ("log-normal, S 8K, T 32K", log_normal, 8192, 4 * 8192),
    ("log-normal, S 8K, T 8K", log_normal, 8192, 8192),
)


def measure_balance(options: Any) -> dict[str, Any]:
    width = run_of("packing", [1], hidden=options.hidden, heads=1, sequence=8, rows=1, microbatches=1).model
    found = {}
    for name, lengths, sequence, tokens in SETTINGS[2:3] if options.quick else SETTINGS:
        task = Task(lengths(), sequence, tokens, quadratic_share(width), options.microbatches)
        found[name] = {arm: figures(pack(task), task) for arm, pack in ARMS.items()}
        tell(name, *(f"\n  {arm}: {of}" for arm, of in found[name].items()))
    return {"hidden": options.hidden, "settings": found}


LOSS_SIZE: Final = {"hidden": 48, "sequence": 512, "rows": 4, "microbatches": 2}
QUICK_LOSS_SIZE: Final = {"hidden": 16, "sequence": 32, "rows": 2, "microbatches": 1}


def loss_run(options: Any, attention: str, seed: int) -> Manifest:
    size = QUICK_LOSS_SIZE if options.quick else LOSS_SIZE
    step = size["rows"] * size["sequence"] * size["microbatches"]
    schedule = {"warmup_tokens": step * options.loss_steps // 20, "total_tokens": step * options.loss_steps}
    model, data = {"attention": attention}, {"source": "python-stdlib", "held_out": 0.05}
    inner = {"learning_rate": 4e-3}
    return run_of("loss", [0, 2], seed=seed, **size, model=model, data=data, inner=inner, schedule=schedule)


def held_out_loss(options: Any, attention: str, seed: int) -> float:
    from node.data.feed import held_out_microbatches

    manifest = loss_run(options, attention, seed)
    trained = Solo(manifest, 1)
    while trained.trainer.tokens < options.loss_steps * manifest.training.inner_tokens:
        trained.step()
    texts = held_out_microbatches(loss_run(options, "documents", seed), 2 if options.quick else 40)
    return float(evaluate(partial(loss_of, trained.model), texts)["loss"])


def measure_loss(options: Any) -> dict[str, Any]:
    losses: dict[str, list[float]] = {"documents": [], "causal": []}
    for seed in options.seeds:
        for arm, of in losses.items():
            of.append(held_out_loss(options, arm, seed))
            tell(f"loss, seed {seed}, {arm}: {of[-1]:.4f}")
    ratio = median_ratio(losses["documents"], losses["causal"])
    perplexity = math.exp((median(losses["documents"]) or 0) - (median(losses["causal"]) or 0))
    return {"losses": losses, "documents_over_causal": round(ratio, 4), "perplexity": round(perplexity, 4)}


def measure(options: Any) -> dict[str, Any]:
    found = {"bars": BARS, **(measure_balance(options) if "balance" in options.parts else {})}
    return found | ({"loss": measure_loss(options)} if "loss" in options.parts else {})


if __name__ == "__main__":
    usual = {"hidden": 256, "microbatches": 512, "seeds": [1, 2, 3], "loss_steps": 300}
    quick = {"microbatches": 64, "seeds": [1], "loss_steps": 3}
    kit.run(__doc__, measure, quick, parts=["balance"], **usual)
