"""The same model over the same links: Skipstone beside what a user would pick instead. Needs root (`lines.py`).

Four processes of one thread each train a Llama on bytes: `5m` has 4.9 million parameters (6 blocks of 256), `20m` has
20.7 (6 blocks of 512). All arms have AdamW (ours: `--inner`), equal rates (`--rate`, 0 for the size's) and initial
deviations, rows of 128 tokens, 4096 tokens a step. `skip-diloco`: a run of one stage, rounds of 8 bits every
`--inner-steps`. `hivemind-local`: hivemind.Optimizer with local updates, epochs of as many tokens, 8 bits.
`torchft-diloco`: torchft 0.2.0, gloo, float32 (its 8 bits need a GPU). `skip-pipe`: stages of 0, 2, 2, 2 blocks, hidden
states of 8 bits, `--staleness`. `torch-pipe`: 1F1B over gloo, stages of 1, 2, 2, 1 blocks, bfloat16 between them.
`solo`: plain torch in one process. `--outer-rate` and `--outer-momentum` are those of both DiLoCos. Links: `lo`, or
Mbit/s up and down by round trip in ms, such as `20x80`.

Other systems need a Python of their own: `python -m venv X; X/bin/pip install hivemind 'numpy<2.4' torchft==0.2.0
opentelemetry-exporter-otlp 'torch==2.13.*'`, then `--peers-python X/bin/python`.

Loss is the training loss, the mean over the last 16,384 tokens of all processes; times begin at the first step of any.
Bytes (with all headers) and CPU time are those between the middle of the first round and the middle of a later one, so
that each round is counted whole; of the whole run if there is no second middle. Memory is the largest process tree's.
Figures are medians of `--repeats`, in which arms and links take turns in random order. `bars`: ours is at most theirs.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import kit
from benchmarks.kit import ROOT, medians, rounded, tell
from benchmarks.lines import Nodes, line_of, nodes_behind
from node.data.sources import python_standard_library
from protocol.identity.keys import Identity
from protocol.manifest.join_link import short_link
from protocol.manifest.manifest import Manifest
from protocol.manifest.signing import sign_manifest
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import RunId
from tests.e2e.home_network import why_no_namespaces

NODES: Final = 4
ROWS: Final = 8  # of a process in a step, where each has the whole model
SEQUENCE: Final = 128
STEP: Final = NODES * ROWS * SEQUENCE
WARMUP_STEPS: Final = 10
TEXT_BYTES: Final = 1_100_000
WINDOW: Final = 16_384
AT_S: Final = (15, 30, 55)
TOKENS: Final = 100_000
PATIENCE_S: Final = 300.0
PORT: Final = 4002
SAMPLE_S: Final = 0.5
SIZES: Final = {
    "tiny": {"hidden": 32, "heads": 2, "feed_forward": 64, "learning_rate": 3e-3},
    "5m": {"hidden": 256, "heads": 4, "feed_forward": 688, "learning_rate": 1.5e-3},
    "20m": {"hidden": 512, "heads": 8, "feed_forward": 1536, "learning_rate": 1e-3},
}
BLOCKS: Final = {"skip-diloco": (6,), "skip-pipe": (0, 2, 2, 2), "torch-pipe": (1, 2, 2, 1)}
ARMS: Final = ("skip-diloco", "skip-pipe", "hivemind-local", "torchft-diloco", "torch-pipe", "solo")
OURS: Final = "skip-diloco"
RIVALS: Final = ("hivemind-local", "torchft-diloco")
# hivemind 1.1.12 cannot read its own 8 bits with NumPy 2.4, and then averages nothing.
NEEDS: Final = {
    "hivemind-local": "import hivemind, numpy; int(numpy.zeros(1))",
    "torchft-diloco": "import torchft.local_sgd",
    "torch-pipe": "import torch.distributed.pipelining",
}


def why_not(arm: str, python: Path) -> str | None:
    """Why this Python cannot run the arm."""
    command = [str(python), "-W", "ignore", "-c", NEEDS.get(arm, "")]
    tried = subprocess.run(command, capture_output=True, text=True)
    return (tried.stderr.strip().splitlines() or ["it failed"])[-1] if tried.returncode else None


def manifest_of(arm: str, options: Any, text: Path) -> Manifest:
    size = dict(SIZES[options.size])
    usual_rate = size.pop("learning_rate")
    inner = {"name": options.inner, "learning_rate": options.rate or usual_rate}
    whole = arm != "skip-pipe"
    return kit.run_of(
        "head-to-head",
        BLOCKS.get(arm, BLOCKS[OURS]),
        sequence=SEQUENCE,
        rows=ROWS if whole else ROWS // 2,
        microbatches=1 if whole else 2 * NODES,
        **size,
        seed=options.seed,
        model={"attention": "causal"},
        data={"source": f"path:{text}", "open": True},
        sections={"codecs": dict.fromkeys(("activations", "gradients", "pseudo_gradients"), "int8")},
        inner=inner,
        inner_steps=options.inner_steps,
        outer={"learning_rate": options.outer_rate, "momentum": options.outer_momentum},
        staleness=0 if whole else options.staleness,
        # A replica of the whole model counts its own tokens until the first round, as others count their own steps.
        schedule={
            "kind": "constant",
            "warmup_tokens": WARMUP_STEPS * (ROWS * SEQUENCE if whole else STEP),
            "total_tokens": 10**12,
        },
    )


def our_command(arm: str, nodes: Nodes, node: int, folder: Path, text: Path, run: RunId) -> list[str]:
    address, first = nodes.address(node), f"{nodes.address(0)}:{PORT}"
    # A short link names an address alone, so that all nodes can start at once, as those of other systems do.
    where = str(short_link(run, (first,)) if node else folder / "run.toml")
    command = [sys.executable, "-P", "-m", "skipstone", "join", where, "--yes", "--json", "--threads", "1"]
    command += ["--text", str(text), "--patience", str(PATIENCE_S), "--listen", address, "--advertise", address]
    command += ["--port", str(PORT), "--dht-port", str(PORT - 1), "--reach", "direct"]
    return [*command, "--stage", str(node)] if arm == "skip-pipe" else command


def peer_command(arm: str, nodes: Nodes, node: int, folder: Path, text: Path, options: Any) -> list[str]:
    manifest = manifest_of(arm, options, text)
    own: dict[str, Any] = {"arm": arm, "rank": node, "world": NODES, "rows": ROWS, "microbatches": 2 * NODES}
    own |= {key: getattr(options, key) for key in ("seed", "inner_steps", "outer_rate", "outer_momentum")}
    own |= {"device": nodes.device, "addresses": [nodes.address(each) for each in range(len(nodes.names))]}
    own |= {"model": manifest.model.model_dump(mode="json"), "blocks": manifest.stages.blocks, "folder": str(folder)}
    own |= {"learning_rate": manifest.training.inner.learning_rate, "warmup_steps": WARMUP_STEPS, "text": str(text)}
    return [str(options.peers_python), "-m", "benchmarks.peers", json.dumps(own)]


@contextmanager
def started(arm: str, nodes: Nodes, folder: Path, text: Path, options: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The process of each node; node N prints to the folder's `N.out` and `N.err`."""
    processes = list[subprocess.Popen[bytes]]()
    signed = sign_manifest(manifest_of(arm, options, text), Identity.load_or_create(folder / "author"))
    (folder / "run.toml").write_bytes(signed.text)
    try:
        for node in range(len(nodes.names)):
            if arm.startswith("skip"):
                command = our_command(arm, nodes, node, folder, text, signed.run)
            else:
                command = peer_command(arm, nodes, node, folder, text, options)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "SKIPSTONE_HOME": str(folder / f"home{node}")}
            with (folder / f"{node}.out").open("wb") as out, (folder / f"{node}.err").open("wb") as err:
                own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "cwd": ROOT}
                own["start_new_session"] = True  # Linux shares the cores between sessions, so none is another's
                processes.append(subprocess.Popen([*nodes.inside(node), *command], env=environment, **own))
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)  # then its namespace kills it


def trees(roots: Sequence[int]) -> Iterator[tuple[float, list[int]]]:
    """CPU seconds and process ids of each process with all that come from it."""
    children, cpu_s = dict[int, list[int]](), dict[int, float]()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
                cpu_s[int(name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with ended children's
    for root in roots:
        found = [root]
        for process in found:
            found += children.get(process, [])
        yield sum(cpu_s.get(process, 0.0) for process in found), found


def resident(processes: Sequence[int]) -> float:
    """MB of memory, of what is shared with others its part."""
    total = 0
    for process in processes:
        with suppress(OSError, IndexError):  # it has ended
            total += int(Path(f"/proc/{process}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
    return 1.024e-3 * total


@dataclass(slots=True)
class Seen:
    """Steps as (time, tokens, loss), and samples as (time, tokens, bytes sent, CPU seconds), of all nodes."""

    steps: list[tuple[float, int, float]] = field(default_factory=list)
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.steps)

    def loss_at(self, at: float) -> float | None:
        """Mean over the last tokens before a time; None if the run is shorter."""
        if at > max(self.samples[-1][0], self.steps[-1][0]):
            return None
        weight, total = 0, 0.0
        for _, tokens, loss in reversed([step for step in self.steps if step[0] <= at]):
            if weight < WINDOW:
                weight, total = weight + tokens, total + tokens * loss
        return total / weight

    def when(self, tokens: int) -> float | None:
        """When so many tokens were done."""
        done = itertools.accumulate(tokens for _, tokens, _ in self.steps)
        return next((at for (at, _, _), so_far in zip(self.steps, done, strict=True) if so_far >= tokens), None)

    def figures(self, round_tokens: int) -> dict[str, Any]:
        first, last = self.steps[0][0], self.steps[-1][0]
        whole = int(self.tokens / round_tokens - 0.5)
        middles = (round_tokens // 2, round_tokens * (2 * whole + 1) // 2)
        times = [self.when(tokens) or last for tokens in middles] if whole else [first, last]
        begin, end = (min(self.samples, key=lambda sample, at=at: abs(sample[0] - at)) for at in times)  # type: ignore[misc]
        tokens = max(1, end[1] - begin[1])
        return {
            "tokens_per_s": round((self.tokens - self.steps[0][1]) / max(last - first, 1e-9), 1),
            **{f"loss_after_{at}_s": rounded(self.loss_at(first + at)) for at in AT_S},
            "loss_at_end": rounded(self.loss_at(last)),
            "loss_each_5_s": [rounded(self.loss_at(first + at)) for at in range(5, int(last - first) + 1, 5)],
            "loss_at_100k_tokens": None if (at := self.when(TOKENS)) is None else rounded(self.loss_at(at)),
            "bytes_per_token": round((end[2] - begin[2]) / tokens, 1),
            "cpu_ms_per_token": round(1e3 * (end[3] - begin[3]) / tokens, 4),
            "rounds_counted": whole,
            "tokens": self.tokens,
            "memory_mb": round(max(self.memory)),
            "memory_mb_of_each": list(map(round, self.memory)),
        }


def watch(processes: Sequence[subprocess.Popen[bytes]], nodes: Nodes, folder: Path, seconds: float) -> Seen:
    """Reads the steps until so long after the first one. Raises RuntimeError if a process ends or none takes a step."""
    seen, before = Seen(memory=[0.0] * len(processes)), [0] * len(processes)
    outputs = [(folder / f"{node}.out").open() for node in range(len(processes))]
    kept, begun, sampled = [""] * len(processes), time.monotonic(), 0.0
    while not seen.steps or time.monotonic() < seen.steps[0][0] + seconds:
        ended = [node for node, process in enumerate(processes) if process.poll() is not None]
        if ended or (not seen.steps and time.monotonic() > begun + PATIENCE_S):
            lines = [line for node in ended or [0] for line in (folder / f"{node}.err").read_text().splitlines()[-2:]]
            raise RuntimeError(f"{f'node {ended[0]} has ended' if ended else 'no step'}: {' / '.join(lines)}")
        now = time.monotonic()
        for node, output in enumerate(outputs):
            *lines, kept[node] = (kept[node] + output.read()).split("\n")
            for event in map(json.loads, filter(lambda line: line.startswith("{"), lines)):
                if event.get("event") == "step":
                    seen.steps.append((now, event["tokens"] - before[node], event["loss"]))
                    before[node] = event["tokens"]
        if now > sampled + SAMPLE_S:
            sampled, count = now, 1 if nodes.device == "lo" else len(processes)
            sent = sum(nodes.sent(node, processes[node].pid) for node in range(count))
            found = list(trees([process.pid for process in processes]))
            seen.samples.append((now, seen.tokens, sent, sum(cpu_s for cpu_s, _ in found)))
            if len(seen.samples) % 10 == 0:
                seen.memory = [max(old, resident(tree)) for old, (_, tree) in zip(seen.memory, found, strict=True)]
        time.sleep(0.05)
    return seen


def measured(arm: str, link: str, text: Path, options: Any) -> dict[str, Any]:
    """Runs an arm once."""
    figures: dict[str, Any] = {"arm": arm, "link": link, "load": round(os.getloadavg()[0], 1)}
    count, begun = 1 if arm == "solo" else NODES, time.monotonic()
    try:
        with (
            kit.folder(None, "run") as folder,
            nodes_behind(line_of(link), count) as nodes,
            started(arm, nodes, folder, text, options) as processes,
        ):
            seen = watch(processes, nodes, folder, options.seconds)
    except RuntimeError as error:
        return figures | {"failed": str(error)}
    figures["first_step_s"] = round(seen.steps[0][0] - begun, 1)
    return figures | seen.figures(options.inner_steps * STEP)


def bars(arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours, theirs, and whether ours is at most theirs, by rival; loss at the longest time that both have reached."""
    found: dict[str, Any] = {}
    for rival in RIVALS:
        if OURS in arms and rival in arms:
            pair = arms[OURS], arms[rival]
            times = [f"loss_after_{at}_s" for at in AT_S]
            reached = [key for key in times if all(arm[key] is not None for arm in pair)][-1:]
            for key in (*reached, "bytes_per_token", "cpu_ms_per_token"):
                ours, theirs = (arm[key] for arm in pair)
                found.setdefault(rival, {})[key] = {"ours": ours, "theirs": theirs, "met": ours <= theirs}
    return found


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians by link and arm, and the bars of each link."""
    found: dict[str, Any] = {}
    for link in dict.fromkeys(run["link"] for run in runs):
        arms: dict[str, Any] = {}
        for arm in ARMS:
            good = [run for run in runs if (run["link"], run["arm"]) == (link, arm) and "failed" not in run]
            keys = [key for key, value in (good or [{}])[0].items() if not isinstance(value, str | list)]
            arms |= {arm: medians(good, keys) | {"runs": len(good)}} if good else {}
        found[link] = {"arms": arms, "bars": bars(arms)}
    return found


def measure(options: Any) -> dict[str, Any]:
    if (reason := why_no_namespaces()) is not None:
        return {"skipped": reason}
    if options.size not in SIZES:
        raise ConfigError(f"no size {options.size}; there are {', '.join(SIZES)}")
    options.peers_python = (options.peers_python or Path(sys.executable)).absolute()
    lacks = {arm: why_not(arm, options.peers_python) for arm in options.arms}
    arms = {arm: f"left out: {lack}" if lack else "measured" for arm, lack in lacks.items()}
    runs, dice = list[dict[str, Any]](), random.Random(options.seed)
    with kit.folder(None, "text") as folder:
        text = options.text.resolve() if options.text else folder / "text.txt"
        if options.text is None:
            library = python_standard_library()
            text.write_bytes(b"".join(map(library.read, library.names))[:TEXT_BYTES])
        for number in range(options.repeats):
            turns = list(itertools.product(options.links, (arm for arm, lack in lacks.items() if not lack)))
            dice.shuffle(turns)
            for link, arm in turns:
                runs.append(measured(arm, link, text, options))
                tell(f"repeat {number + 1}: {json.dumps(runs[-1])}")
    task = {
        **SIZES[options.size],
        "blocks": sum(BLOCKS[OURS]),
        "nodes": NODES,
        "step_tokens": STEP,
        "sequence": SEQUENCE,
    }
    task |= {"inner_steps": options.inner_steps, "seconds": options.seconds, "repeats": options.repeats}
    return {"task": task, "arms": arms, "links": summary(runs), "runs": runs}


if __name__ == "__main__":
    usual = {"links": ["lo", "100x20", "20x80"], "size": "5m", "seconds": 60.0, "repeats": 3, "seed": 1, "staleness": 1}
    usual |= {"inner_steps": 20, "outer_rate": 0.7, "outer_momentum": 0.5, "inner": "adamw", "rate": 0.0}
    quick = {"arms": ["solo", OURS], "links": ["lo"], "size": "tiny", "seconds": 5.0, "repeats": 1, "inner_steps": 4}
    kit.run(__doc__, measure, quick, arms=ARMS, text=Path, peers_python=Path, **usual)
