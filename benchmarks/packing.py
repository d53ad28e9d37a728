"""Packing of documents into microbatches: ours beside concatenation with a document mask and WLB-LLM's outlier queues.

    python benchmarks/packing.py [--lengths FILE --sequence S --tokens T] [--hidden 256] [--microbatches 512] --json

`--lengths` is a JSON list of document lengths in tokens. Without it: the standard library's modules by their bytes, and
log-normal lengths, at S and T = 4 S as in `SETTINGS`, and at T = S for the record. Documents are drawn in a new order
again and again (seeded) until there are so many microbatches. `ours` is what a data node packs
(`node.data.packing` by `swarm.workload.packing`); the others are here for comparison:

* `concat`: one stream, cut every T tokens, and a mask between documents.
* `queues`: documents of more than a quarter of S wait in outlier queues until there is one for each of a batch's 8
  microbatches; a batch is packed by cost, the longest first (WLB-LLM, arXiv:2503.17924, section 4.2).

A document's cost is d + r d^2, r that of a model of this width (`quadratic_share`). Of each arm: `max_over_mean`, the
largest of all runs of 8 microbatches in a row (largest cost over the mean one); `cv2`, the squared coefficient of
variation of all costs; `padding`, the part of T that the mean microbatch leaves empty (nothing is computed for it);
`cut`, documents that would have fitted into S and were cut, of all that fit; `ms_a_block`, the longest time (of the
processor, the best of three) of packing 64 microbatches or a million tokens at once.

Ends with one line of JSON; progress and a table go to stderr.
"""

from __future__ import annotations

import argparse
import json
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

from node.data.packing import BLOCK_MICROBATCHES, MOST_DOCUMENTS, tokens_of_block, tokens_of_last
from protocol.manifest.model import ModelSection, quadratic_share
from swarm.workload.packing import Room, pack_and_end

WINDOW: Final = 8
QUEUES: Final = (0.25, 0.5, 0.75)
"""Of S: documents longer than these are outliers of one queue each."""
SEED: Final = 5
BARS: Final = {"max_over_mean": 1.04, "cv2": 0.002, "padding": 0.02, "ms_a_block": 20.0}
REPEATS: Final = 3


@dataclass(frozen=True, slots=True)
class Packed:
    """One microbatch: the lengths of its documents and pieces."""

    documents: tuple[int, ...]

    def cost(self, share: float) -> float:
        return sum(length + share * length * length for length in self.documents)


@dataclass(frozen=True, slots=True)
class Task:
    """What is packed: documents of these lengths, at most `sequence` tokens looked at together, `tokens` in a
    microbatch."""

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


@dataclass(frozen=True, slots=True)
class Arm:
    """What an arm has packed."""

    packed: list[Packed]
    cut: float
    ms_a_block: float


# ---- arms ------------------------------------------------------------------------------------------------------------


def ours(task: Task) -> Arm:
    """As a data node's packer does, without the text."""
    budget = tokens_of_block(task.tokens)
    room, level = Room(task.sequence, task.tokens, task.share), 0.0
    stream, packed, longest_s = task.stream(), list[Packed](), 0.0
    waiting = deque[tuple[int, bool]]()
    """Documents and the rests of such that have been read, and whether they are rests."""
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
        lengths = [tokens for tokens, _ in whole]
        cut = [
            place
            for place, (tokens, is_rest) in enumerate([*read, last][: len(whole)])
            if is_rest or tokens > task.sequence
        ]
        chance = partial(_shuffled, len(packed))
        (found, kept), seconds = _timed(partial(pack_and_end, lengths, cut, room, level, chance))
        longest_s, level = max(longest_s, seconds), found.level
        waiting.extendleft(reversed([*read, last][kept:] if kept < len(whole) else [rest]))
        packed += [Packed(tuple(piece.stop - piece.start for piece in chosen)) for chosen in found.microbatches]
    return Arm(packed, 0.0, 1000 * longest_s)


def _shuffled(key: int, count: int) -> list[int]:
    return random.Random(f"{SEED}:{key}").sample(range(count), count)


def concat(task: Task) -> Arm:
    """One stream, cut every T tokens and, within them, every S tokens of one document."""
    packed, cut, fitting, room = list[Packed](), 0, 0, task.tokens
    current: list[int] = []
    begun = time.perf_counter()
    for length in task.stream():
        left = length + 1
        fits, whole = left <= task.sequence, left <= room
        fitting += fits
        cut += fits and not whole
        while left > 0:
            taken = min(left, room, task.sequence)
            current.append(taken)
            left, room = left - taken, room - taken
            if not room:
                packed.append(Packed(tuple(current)))
                current, room = [], task.tokens
        if len(packed) >= task.microbatches:
            break
    seconds = (time.perf_counter() - begun) * BLOCK_MICROBATCHES / len(packed)
    return Arm(packed, cut / max(1, fitting), 1000 * seconds)


def queues(task: Task) -> Arm:
    """WLB-LLM's outlier queues before batches of 8 microbatches, packed by cost; what does not fit waits for the
    next."""
    bounds = [share * task.sequence for share in QUEUES]
    outliers: list[list[int]] = [[] for _ in bounds]
    packed, batch, tokens, longest_s = list[Packed](), list[int](), 0, 0.0
    left_over: list[int] = []
    for length in _whole_pieces(task):
        queue = max((place for place, bound in enumerate(bounds) if length > bound), default=None)
        if queue is None:
            batch.append(length)
            tokens += length
        else:
            outliers[queue].append(length)
            if len(outliers[queue]) >= WINDOW:
                batch += outliers[queue]
                tokens += sum(outliers[queue])
                outliers[queue] = []
        if tokens < WINDOW * task.tokens:
            continue
        (made, left_over), seconds = _timed(lambda batch=batch: _batch(batch, task))
        longest_s = max(longest_s, seconds)
        packed += made
        batch, tokens = left_over, sum(left_over)
        if len(packed) >= task.microbatches:
            break
    return Arm(packed, 0.0, 1000 * longest_s * BLOCK_MICROBATCHES / WINDOW)


def _whole_pieces(task: Task) -> Iterator[int]:
    for length in task.stream():
        left = length + 1
        while left > 0:
            yield min(left, task.sequence)
            left -= task.sequence


def _batch(lengths: list[int], task: Task) -> tuple[list[Packed], list[int]]:
    """The longest first into the cheapest with room; and what is left."""
    bins: list[list[int]] = [[] for _ in range(WINDOW)]
    costs, tokens = [0.0] * WINDOW, [0] * WINDOW
    left = []
    for length in sorted(lengths, reverse=True):
        fitting = [place for place in range(WINDOW) if tokens[place] + length <= task.tokens]
        if not fitting:
            left.append(length)
            continue
        place = min(fitting, key=costs.__getitem__)
        bins[place].append(length)
        tokens[place] += length
        costs[place] += length + task.share * length * length
    return [Packed(tuple(found)) for found in bins if found], left


ARMS: Final[dict[str, Callable[[Task], Arm]]] = {"ours": ours, "concat": concat, "queues": queues}


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the shortest of a few times, without what other processes took of the core."""
    seconds = []
    for _ in range(REPEATS):
        begun = time.thread_time()
        found = work()
        seconds.append(time.thread_time() - begun)
    return found, min(seconds)


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(arm: Arm, task: Task) -> dict[str, float]:
    costs = [one.cost(task.share) for one in arm.packed]
    runs = [costs[start : start + WINDOW] for start in range(max(1, len(costs) - WINDOW + 1))]
    mean = math.fsum(costs) / len(costs)
    tokens = sum(sum(one.documents) for one in arm.packed) / len(arm.packed)
    return {
        "max_over_mean": round(max(max(run) * len(run) / math.fsum(run) for run in runs), 4),
        "cv2": round(math.fsum((cost - mean) ** 2 for cost in costs) / len(costs) / mean**2, 6),
        "padding": round(1 - tokens / task.tokens, 4),
        "cut": round(arm.cut, 4),
        "ms_a_block": round(arm.ms_a_block, 2),
    }


def standard_library() -> list[int]:
    """Bytes of this Python's modules, without tests and what is installed."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "site-packages", "dist-packages"}
    files = (path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts))
    return [size for path in files if (size := path.stat().st_size)]


def log_normal(count: int = 20_000) -> list[int]:
    rng = random.Random(1)
    return [max(1, int(rng.lognormvariate(6.3, 1.3))) for _ in range(count)]


SETTINGS: Final[tuple[tuple[str, Callable[[], list[int]], int, int], ...]] = (
    ("standard library, S 4K, T 16K", standard_library, 4096, 4 * 4096),
    ("standard library, S 16K, T 64K", standard_library, 16_384, 4 * 16_384),
    ("log-normal, S 2K, T 8K", log_normal, 2048, 4 * 2048),
    ("log-normal, S 8K, T 32K", log_normal, 8192, 4 * 8192),
    ("standard library, S 16K, T 16K", standard_library, 16_384, 16_384),
    ("log-normal, S 8K, T 8K", log_normal, 8192, 8192),
)


def share_of(hidden: int) -> float:
    """Of a model of this width, as wide in its feed-forward layers as Llama's are."""
    section = ModelSection(
        vocabulary=257, hidden=hidden, heads=1, kv_heads=1, feed_forward=max(8, 8 * hidden // 3), sequence=8
    )
    return quadratic_share(section)


def measured(task: Task) -> dict[str, dict[str, float]]:
    """All arms, on the same documents."""
    return {name: figures(arm(task), task) for name, arm in ARMS.items()}


def table(name: str, arms: dict[str, dict[str, float]], *, bars: bool) -> str:
    lines = [name]
    for arm, found in arms.items():
        missed = [key for key, most in BARS.items() if found[key] > most]
        verdict = "" if arm != "ours" or not bars else f"  missed: {', '.join(missed)}" if missed else "  all bars met"
        lines.append(f"  {arm:8}" + "  ".join(f"{key} {value:g}" for key, value in found.items()) + verdict)
    return "\n".join(lines)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, help="JSON list of document lengths")
    parser.add_argument("--sequence", type=int, help="tokens that are looked at together, at most")
    parser.add_argument("--tokens", type=int, help="of a microbatch, at most; 4 x sequence when absent")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--json", action="store_true", help="the JSON line alone, without the table")
    options = parser.parse_args(words)
    if (options.lengths is None) != (options.sequence is None):
        parser.error("--lengths and --sequence go together")
    if options.sequence is not None and not 8 <= options.sequence <= (options.tokens or 4 * options.sequence):
        parser.error("a document of --sequence tokens, 8 or more, has to fit into --tokens")
    return options


def read_lengths(path: Path) -> list[int]:
    """Raises ValueError for what is no list of lengths."""
    lengths = json.loads(path.read_text())
    if not isinstance(lengths, list) or not lengths or not all(type(one) is int and one >= 1 for one in lengths):
        raise ValueError(f"{path} is not a JSON list of whole numbers from 1")
    return lengths


def main() -> None:
    options = parsed()
    share = share_of(options.hidden)
    tell = (lambda text: None) if options.json else (lambda text: print(text, file=sys.stderr, flush=True))
    if options.lengths is not None:
        tokens = options.tokens or 4 * options.sequence
        task = Task(read_lengths(options.lengths), options.sequence, tokens, share, options.microbatches)
        arms = measured(task)
        tell(table(str(options.lengths), arms, bars=True))
        print(json.dumps({"arms": arms}))
        return
    settings = {}
    for name, lengths, sequence, tokens in SETTINGS:
        settings[name] = measured(Task(lengths(), sequence, tokens, share, options.microbatches))
        tell(table(name, settings[name], bars=tokens >= 4 * sequence))
    first = next(iter(settings.values()))
    print(json.dumps({"benchmark": "packing", "hidden": options.hidden, "settings": settings, "arms": first}))


if __name__ == "__main__":
    main()
