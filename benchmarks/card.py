"""What Skipstone does on one GPU: tests, ceilings, training, codecs, attention, hops, a swarm, split backward passes.

    python -m benchmarks.card --out DIR [--only tests,train] [--smoke]

Each part runs in a child process with its own time limit, so a crash or a hang costs that part only. `DIR/card.json` is
written after every part, `DIR/card.log` holds what the parts printed, and a table comes last. All parts together take
less than 6 minutes. `--smoke` runs every part with small sizes, on the CPU if there is no GPU. GB are 10**9 bytes.
"""

import argparse
import asyncio
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.kit import ROOT, rate, verdict
from benchmarks.plain import Decoder
from benchmarks.plain import loss_of as plain_loss
from protocol.codecs import decode, encode
from protocol.codecs.memory import buffer_for
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId

WHOLE_S: Final = 350
"""Time for all parts together, in seconds."""
CODECS: Final = (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4)
SHOWN_LINES: Final = 4
"""Lines of each failure that the report keeps."""

Result = dict[str, Any]
Tell = Callable[[str, Any], None]
"""Reports one figure of a part, which survives whatever happens to the part afterwards."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a part needs to know."""

    smoke: bool
    device: torch.device
    known: Result
    """Results of earlier parts, by the part's name."""

    def size(self, full: int, small: int) -> int:
        return small if self.smoke else full


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int = 10, warm_up: int = 3) -> float:
    """Median time of a call until the device has done it, in ms."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        settle(device)
        begun = time.perf_counter()
        call()
        settle(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def kernels(call: Callable[[], object], device: torch.device) -> int | None:
    """Kernels and copies that a call gives to the GPU; None without one."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        settle(device)
    # "cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync"
    names = [event.name for event in profiler.events() or ()]
    return sum(name.startswith("cu") and ("LaunchKernel" in name or name.endswith("Async")) for name in names)


def rounded(**figures: float | None) -> Result:
    """Figures with four significant digits."""
    return {name: value if value is None else float(f"{value:.4g}") for name, value in figures.items()}


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def fresh(device: torch.device) -> None:
    """Frees what an earlier measurement left, and counts the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ---- tests, ceilings -------------------------------------------------------------------------------------------------


def tests(setting: Setting, tell: Tell) -> None:
    """Runs the tests that need a card; each failure with its first lines."""
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.cuda" in path.read_text("utf-8")]
    tell("files", [str(path.relative_to(ROOT)) for path in files])
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Warnings are the installed libraries' own on a machine whose versions are not ours.
        options = ["-m", "cuda", "-W", "default", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        subprocess.run(command, cwd=ROOT, check=False, stdout=sys.stderr)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name", ""): found for case in cases for found in case if found.tag in ("failure", "error")}
    skipped = sum(found.tag == "skipped" for case in cases for found in case)
    tell("passed", len(cases) - len(failed) - skipped)
    tell("skipped", skipped)
    tell("failed", len(failed))
    for name, found in failed.items():
        lines = [line for line in (found.text or "").splitlines() if line.startswith("E ")] or [
            found.get("message", "")
        ]
        tell(f"failed {name}", lines[:SHOWN_LINES])


def ceilings(setting: Setting, tell: Tell) -> None:
    """Measures the limits that other figures are compared with."""
    device = setting.device
    source = torch.randn(setting.size(2**28, 2**20), device=device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    tell("copy_gb_s", rounded(v=moved / 1e6 / milliseconds(lambda: target.copy_(source), device))["v"])
    side = setting.size(8192, 256)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    took_ms = milliseconds(lambda: left @ right, device)
    tell("matmul_bf16_tflop_s", rounded(v=2 * side**3 / 1e9 / took_ms)["v"])
    if device.type == "cuda":
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        here = torch.empty(2**28, dtype=torch.uint8, device=device)
        to_device = milliseconds(lambda: here.copy_(host, non_blocking=True), device)
        to_host = milliseconds(lambda: host.copy_(here, non_blocking=True), device)
        tell("host_to_device_gb_s", rounded(v=host.nbytes / 1e6 / to_device)["v"])
        tell("device_to_host_gb_s", rounded(v=host.nbytes / 1e6 / to_host)["v"])


# ---- training --------------------------------------------------------------------------------------------------------


def run_of(setting: Setting, parameters: int, inner: str = "adamw", blocks: tuple[int, ...] | None = None) -> Manifest:
    """The run that `skipstone new --size` makes, with steps of 8 microbatches."""
    from node.dial.dial import Wish, turn

    # Choices of the dial, but for the tokens of a step: its own would be minutes of one card.
    table = turn(Wish(parameters=parameters, inner=inner, may_be_whole=False, residual=0), "card").manifest.model_dump()
    all_blocks = sum(table["stages"]["blocks"])
    if setting.smoke:
        table["model"] |= {"sequence": 32, "dtype": "float32"}  # CPUs without bfloat16 emulate it slowly
        table["training"] |= {"rows": 1}
    tokens = (2 if setting.smoke else 8) * table["training"]["rows"] * table["model"]["sequence"]
    table["training"] |= {"inner_tokens": tokens}
    table["stages"] |= {"blocks": blocks or (0, all_blocks)}
    return manifest_from_table(table)


def parameters_in(manifest: Manifest) -> int:
    from node.model.shapes import BYTES_PER_PARAMETER, parameter_bytes, parameter_shapes

    return sum(parameter_bytes(parameter_shapes(manifest, m)) // BYTES_PER_PARAMETER for m in manifest.modules())


def drawn_on(device: torch.device, seed: int, name: str, shape: Sequence[int], deviation: float) -> Tensor:
    """Initial weights in less time than those of a run take, which are the same on every machine."""
    return torch.randn(tuple(shape), device=device) * deviation


def solo(manifest: Manifest, moments: str, seconds: float, device: torch.device) -> Result:
    """Trains as `skipstone solo` does; its rate between the first and the last step."""
    from node.model import initialization
    from node.model.moments import MomentType
    from node.observability.events import Step
    from node.solo.trainer import train_solo

    initialization.near_normal = partial(drawn_on, device)
    fresh(device)
    times: list[tuple[float, int]] = []

    def on_event(event: object) -> None:
        if isinstance(event, Step):
            settle(device)
            times.append((time.perf_counter(), event.tokens))

    def is_over() -> bool:
        return len(times) > 1 and time.perf_counter() - times[0][0] > seconds

    chosen = {"device": device, "on_event": on_event, "moments": MomentType(moments), "should_stop": is_over}
    train_solo(manifest, steps=10**6, **chosen)  # type: ignore[arg-type]
    return trained(manifest, times, device)


def trained(manifest: Manifest, times: list[tuple[float, int]], device: torch.device) -> Result:
    count, peak = parameters_in(manifest), peak_bytes(device)
    figures = rounded(
        tokens_per_s=rate(times),
        parameters=count,
        peak_gb=peak / 1e9 or None,
        bytes_a_parameter=peak / count or None,
    )
    return figures | {"steps": len(times) - 1}


def plain(manifest: Manifest, seconds: float, device: torch.device) -> Result:
    """Trains the same model in a plain torch loop: float32 weights, bfloat16 autocast, fused AdamW, SDPA."""
    fresh(device)
    with torch.device(device):
        model = Decoder(manifest.model, sum(manifest.stages.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (manifest.training.rows, manifest.model.sequence)
    accumulated = manifest.training.inner_tokens // manifest.microbatch_tokens
    times: list[tuple[float, int]] = []
    while len(times) < 2 or time.perf_counter() - times[0][0] < seconds:
        for _ in range(accumulated):
            tokens = torch.randint(manifest.model.vocabulary, shape, device=device)
            with torch.autocast(device.type, torch.bfloat16):
                loss = plain_loss(model(tokens), tokens.roll(-1, dims=1)) / accumulated
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        settle(device)
        times.append((time.perf_counter(), (len(times) + 1) * accumulated * manifest.microbatch_tokens))
    return trained(manifest, times, device)


def train(setting: Setting, tell: Tell) -> None:
    """Measures training in one process beside a plain torch loop, at 160M and at the largest size for 24 GB."""
    device, seconds = setting.device, 0.5 if setting.smoke else 5.0
    peak = setting.known.get("ceilings", {}).get("matmul_bf16_tflop_s")
    parameters = setting.size(160 * 10**6, 10**6)

    def with_mfu(figures: Result) -> Result:
        done = 6 * figures["parameters"] * figures["tokens_per_s"] / 1e12
        return figures | rounded(tflop_s=done, mfu=done / peak if peak else None)

    small = run_of(setting, parameters)
    tell("plain 160m", with_mfu(plain(small, seconds, device)))
    tell("solo 160m", with_mfu(solo(small, "float32", seconds, device)))
    tell("solo 160m 8bit", with_mfu(solo(small, "8bit", seconds, device)))
    for inner in ("soap", "muon"):
        tell(f"solo 160m {inner}", with_mfu(solo(run_of(setting, parameters, inner), "float32", seconds, device)))
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 24e9 / total), device)
    sizes = [2 * 10**6] if setting.smoke else [n * 10**8 for n in (12, 10, 8, 6, 4)]
    for arm in (partial(solo, moments="float32"), plain):
        name = "plain" if arm is plain else "solo"
        for size in sizes:
            try:
                figures = arm(run_of(setting, size), seconds=seconds, device=device)
            except Exception as error:  # too large: the next smaller one
                tell(f"{name} 24 GB does not fit", f"{size / 1e6:.0f}M: {type(error).__name__}: {str(error)[:150]}")
                continue
            tell(f"{name} 24 GB largest", with_mfu(figures))
            break


# ---- codecs, attention -----------------------------------------------------------------------------------------------


def codecs(setting: Setting, tell: Tell) -> None:
    """Measures each codec on hidden states on the device: time until the bytes are on the host, or the tensor is back
    on the device.
    """
    device, shape = setting.device, (4, setting.size(1024, 64), setting.size(2048, 256))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    values[..., [3, 77]] *= 50  # two channels that blockwise codecs send apart
    for dtype in (torch.bfloat16, torch.float32):
        here = values.to(dtype)
        there, out = here.to(device), torch.empty(shape, dtype=dtype, device=device)
        copy_ms = milliseconds(lambda out=out, there=there: out.copy_(there), device)
        tell(f"copy {str(dtype)[6:]}", rounded(gb_s=here.nbytes / 1e6 / copy_ms, ms=copy_ms))
        for codec in CODECS:
            if codec is Codec.BF16 and dtype is torch.bfloat16:
                continue
            encoded = encode(there, codec)
            buffer = buffer_for(encoded.data.nbytes, device)
            buffer[:] = encoded.data
            encoding, decoding = partial(encode, there, codec), partial(decode, encoded.spec, buffer, out)
            encode_ms, decode_ms = milliseconds(encoding, device), milliseconds(decoding, device)
            figures = rounded(
                encode_gb_s=here.nbytes / 1e6 / encode_ms,
                decode_gb_s=here.nbytes / 1e6 / decode_ms,
                encode_ms=encode_ms,
                decode_ms=decode_ms,
            )
            figures |= {"encode_kernels": kernels(encoding, device), "decode_kernels": kernels(decoding, device)}
            figures["equal_to_cpu"] = bytes(encode(here.clone(), codec).data) == bytes(encode(there, codec).data)
            tell(f"{codec.name.lower()} {str(dtype)[6:]}", figures)


def attention(setting: Setting, tell: Tell) -> None:
    """Measures attention within the documents of a packed microbatch against rows of 1024 tokens of the same size."""
    from node.model.document_attention import document_attention, kernel_for

    device, tokens, row = setting.device, setting.size(16_384, 512), setting.size(1024, 64)
    heads, kv_heads, head = setting.size(16, 4), setting.size(4, 2), setting.size(128, 16)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    documents = tuple(document_lengths(tokens, row))
    shapes = [(1, heads, tokens, head), (1, kv_heads, tokens, head), (1, kv_heads, tokens, head)]
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    rows = [t.detach().view(t.shape[1], -1, row, head).transpose(0, 1).contiguous().requires_grad_() for t in inputs]
    gradient = torch.randn(shapes[0], device=device, dtype=dtype)
    arms: dict[str, tuple[Callable[[], Tensor], list[Tensor], int]] = {
        "documents": (lambda: document_attention(*inputs, documents), inputs, sum(n * n for n in documents)),
        "sdpa on rows": (
            lambda: F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True),
            rows,
            tokens * row,
        ),
    }
    tell("kernel", kernel_for(device.type, dtype, head).value)
    for name, (forward, sources, pairs) in arms.items():

        def both(forward: Callable[[], Tensor] = forward, sources: list[Tensor] = sources) -> object:
            result = forward()
            return torch.autograd.grad(result, sources, gradient.view_as(result))

        forward_ms, both_ms = milliseconds(forward, device), milliseconds(both, device)
        operations = 2 * pairs * heads * head  # two products of half of the square
        figures = rounded(
            forward_ms=forward_ms,
            forward_backward_ms=both_ms,
            tflop_s=3.5 * operations / 1e9 / both_ms,
        )
        tell(name, figures | {"pieces": len(documents) if name == "documents" else tokens // row})


def document_lengths(tokens: int, longest: int) -> Iterator[int]:
    """Lengths like those of a text's documents: many short ones, a few long ones."""
    generator = torch.Generator().manual_seed(1)
    while tokens:
        drawn = int(torch.empty(1).log_normal_(5.5, 1.2, generator=generator).item())
        length = min(max(8, drawn), 4 * longest, tokens)
        tokens -= length
        yield length


# ---- hop, swarm, split -----------------------------------------------------------------------------------------------


def hop(setting: Setting, tell: Tell) -> None:
    """Measures one hop between two processes on the device, with the node's own transport."""
    from benchmarks.hop import skipstone

    shape = (2, 16, 64) if setting.smoke else (4, 512, 1024)
    for codec in (Codec.INT8,) if setting.smoke else (Codec.NONE, Codec.BF16, Codec.INT8):
        with skipstone(shape, codec, setting.device.type) as a_round:
            a_round()
            samples = [sample for _ in range(setting.size(5, 1)) for sample in a_round()]
        both = statistics.median(sample.forward_backward_s for sample in samples)
        moved = 4 * 4 * shape[0] * shape[1] * shape[2]
        forward = statistics.median(sample.forward_s for sample in samples)
        figures = rounded(forward_ms=1e3 * forward, forward_backward_ms=1e3 * both, mb_s=moved / 1e6 / both)
        tell(codec.name.lower(), figures)


def swarm(setting: Setting, tell: Tell) -> None:
    """Trains three stages on one card, kills a replica, and audits the logs."""
    asyncio.run(local_swarm(setting, tell))


async def local_swarm(setting: Setting, tell: Tell) -> None:
    from node.local_swarm.local_swarm import LocalSwarm
    from node.local_swarm.setup import LocalSwarmOptions
    from node.observability.events import NodeSummary, Step

    whole = run_of(setting, setting.size(160 * 10**6, 10**6))
    blocks = sum(whole.stages.blocks)
    manifest = run_of(setting, setting.size(160 * 10**6, 10**6), blocks=(0, blocks - blocks // 2, blocks // 2))
    seconds = setting.size(60, 4)
    steps: list[tuple[float, int]] = []
    summaries: list[NodeSummary] = []
    with tempfile.TemporaryDirectory() as logs:
        options = LocalSwarmOptions(peers=4, log_dir=Path(logs))
        begun, at_kill = time.perf_counter(), 0
        async with LocalSwarm(manifest, options) as nodes:
            async for event in nodes.events():
                now = time.perf_counter()
                if isinstance(event, Step):
                    steps.append((now, event.tokens))
                    if len(steps) == 1:
                        tell("first_step_after_s", round(now - begun, 1))
                    elif not at_kill and now - steps[0][0] > seconds / 2:
                        tell("before_the_kill", rounded(tokens_per_s=rate(steps)))
                        replica = nodes.peers[-1].index
                        os.kill(nodes.processes()[replica], signal.SIGKILL)
                        at_kill = len(steps)
                    if now - steps[0][0] > seconds:
                        nodes.request_stop()
                elif isinstance(event, NodeSummary):
                    summaries.append(event)
        tell("after_the_kill", rounded(tokens_per_s=rate(steps[at_kill:])))
        alone = setting.known.get("train", {}).get("solo 160m", {}).get("tokens_per_s")
        tell("over_solo", rounded(v=rate(steps[:at_kill]) / alone)["v"] if alone else None)
        for summary in summaries:
            busy = summary.busy_s
            whole_s = busy.compute + busy.idle_work + busy.wait
            kinds = ("compute", "idle_work", "codec", "wire", "wait")
            tell(f"time of {summary.module}", rounded(**{kind: getattr(busy, kind) / whole_s for kind in kinds}))
        report: Any = (await asyncio.to_thread(verdict, Path(logs)))["report"]
        tell("check", {"violations": len(report["violations"]), **{k: v for k, v in report.items() if type(v) is int}})


def split(setting: Setting, tell: Tell) -> None:
    """Measures chunks of deferred weight gradients, and how much later a pass begins because of one."""
    asyncio.run(split_passes(setting, tell))


async def split_passes(setting: Setting, tell: Tell) -> None:
    from node.concurrency.compute_thread import ComputeThread, Priority
    from node.pipeline.runner import Job
    from node.pipeline.worker import host_hop
    from swarm.pipeline.custody import Key, Work
    from swarm.vocabulary.pipeline_messages import Purpose

    device, chunks = setting.device, list[float]()
    table = run_of(setting, setting.size(500 * 10**6, 10**6)).model_dump()
    table["training"] |= {"staleness": 0, "inner_tokens": 10**6 * table["training"]["inner_tokens"]}
    table["stages"] |= {"blocks": (sum(table["stages"]["blocks"]) - 4, 4)}
    manifest = manifest_from_table(table)
    hidden = torch.randn(manifest.hidden_shape).to(getattr(torch, manifest.model.dtype))
    message = encode(hidden, Codec.NONE)
    documents = (manifest.model.sequence,) * manifest.training.rows if manifest.packs_documents else ()

    def timed(pieces: Iterator[None]) -> Iterator[None]:
        while True:
            begun = time.perf_counter()
            try:
                next(pieces)
            except StopIteration:
                return
            settle(device)
            chunks.append(1e3 * (time.perf_counter() - begun))
            yield

    def job(number: int, work: Work) -> Job:
        key = Key(MicrobatchId(PeerId("data"), number), 0)
        gradient = message if work is Work.BACKWARD else None
        return Job(number, key, work, Purpose.TRAIN, message, gradient, documents=documents)

    def submit(pieces: Iterator[None], name: str) -> Any:
        return compute.submit(timed(pieces), name)

    with ComputeThread(settle=partial(settle, device)) as compute:
        hosting = partial(host_hop, manifest, ModuleId(1), device, 2**33, submit=submit)
        worker = await compute.run(Priority.UPKEEP, hosting)
        tell("puts_weights_off", worker.deferred.chosen.value)

        async def passed(number: int, work: Work) -> float:
            begun = time.perf_counter()
            await compute.run(Priority.TRAIN, lambda: worker.compute(job(number, work)))
            return 1e3 * (time.perf_counter() - begun)

        quiet, backward, beside = list[float](), list[float](), list[float]()
        for number in range(setting.size(24, 6)):
            forward_ms = await passed(number, Work.FORWARD)
            backward_ms = await passed(number, Work.BACKWARD)
            if number >= 2:  # the first ones warm up
                backward.append(backward_ms)
                quiet.append(forward_ms) if number % 2 == 0 else None
            other = 1000 + number
            if number % 2:  # a pass that comes while the weight gradients of the last one are computed
                beside.append(await passed(other, Work.FORWARD))
                await passed(other, Work.BACKWARD)
            while compute.idle_waiting:  # noqa: ASYNC110 - the thread has no event for it
                await asyncio.sleep(0.005)
        tell("forward_ms", rounded(median=statistics.median(quiet), worst=max(quiet)))
        tell("first_half_of_backward_ms", rounded(median=statistics.median(backward)))
        late = [each - statistics.median(quiet) for each in beside[1:]]
        tell("delay_of_a_waiting_pass_ms", rounded(median=statistics.median(late), worst=max(late)))
        figures = rounded(median=statistics.median(chunks), longest=max(chunks))
        tell("chunk_ms", figures | {"chunks_a_microbatch": round(len(chunks) / worker.deferred.visits, 1)})


# ---- parts in their processes ----------------------------------------------------------------------------------------

PARTS: Final[dict[str, tuple[Callable[[Setting, Tell], None], int]]] = {
    "ceilings": (ceilings, 30),
    "train": (train, 140),
    "codecs": (codecs, 30),
    "attention": (attention, 30),
    "hop": (hop, 60),
    "split": (split, 40),
    "tests": (tests, 100),
    "swarm": (swarm, 110),
}
"""Each part, and its time limit in seconds."""


def run_part(name: str, smoke: bool, known: Result) -> None:
    """Runs a part in this process; prints what is known after each of its figures."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if smoke:
        torch.set_num_threads(1)
    torch.zeros(1, device=device)  # memory cannot be counted before there is a context
    result: Result = {}

    def tell(what: str, value: Any) -> None:
        result[what] = value
        print(json.dumps(result), flush=True)

    PARTS[name][0](Setting(smoke, device, known), tell)


def start_part(name: str, smoke: bool, known: Result, limit_s: float, log: Any) -> Result:
    """Runs a part in a child process; its figures, and how it ended."""
    command = [sys.executable, "-m", "benchmarks.card", "--part", name, *(["--smoke"] if smoke else [])]
    begun = time.perf_counter()
    log.write(f"==== {name}\n")
    log.flush()
    child = subprocess.Popen(
        [*command, "--known", json.dumps(known)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,  # so that what it started can be killed with it
    )
    try:
        output, _ = child.communicate(timeout=limit_s)
        ended = "ok" if child.returncode == 0 else f"exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        ended = f"stopped after {limit_s:.0f} s"
    figures: Result = {}
    for line in output.splitlines():
        log.write(f"{line}\n")
        if line.startswith("{"):
            figures = json.loads(line)
    return {"ended": ended, "seconds": round(time.perf_counter() - begun, 1), "result": figures}


def device_name() -> Result:
    """The card, its driver's free memory, and the versions in use."""
    found: Result = {"device": "cpu", "torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {"device": torch.cuda.get_device_name(), "memory_gb": round(total / 1e9, 1)}
        found |= {"free_gb": round(free / 1e9, 1), "cuda": torch.version.cuda}
    return found


def table(report: Result) -> str:
    """A line for each figure, or for each row of figures."""
    lines = [f"{report['machine']['device']}, torch {report['machine']['torch']}, {report['seconds']} s"]
    for name, part in report["parts"].items():
        lines.append(f"{name}: {part['ended']}, {part['seconds']} s")
        for what, value in part["result"].items():
            text = value
            if isinstance(value, dict):
                text = ", ".join(f"{key} {each}" for key, each in value.items() if each is not None)
            lines.append(f"  {what}: {text}"[:230])
    return "\n".join(lines)


def main() -> int:
    """Runs all parts, or one of them as a child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="folder for card.json and card.log")
    parser.add_argument("--only", help=f"parts, with commas between them: {','.join(PARTS)}")
    parser.add_argument("--smoke", action="store_true", help="small sizes; for the CPU")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--known", type=json.loads, default={}, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        run_part(chosen.part, chosen.smoke, chosen.known)
        return 0
    names = chosen.only.split(",") if chosen.only else list(PARTS)
    unknown = sorted(set(names) - set(PARTS))
    if unknown or chosen.out is None:
        parser.error(f"there is no part {', '.join(unknown)}" if unknown else "--out is required")
    chosen.out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    machine = device_name() if not chosen.smoke else {"device": "smoke", "torch": torch.__version__}
    report: Result = {"command": f"python -m benchmarks.card --only {','.join(names)}", "machine": machine}
    report |= {"date": datetime.now(UTC).date().isoformat(), "smoke": chosen.smoke, "seconds": 0.0, "parts": {}}
    with (chosen.out / "card.log").open("w", encoding="utf-8") as log:
        for name in names:
            left = WHOLE_S - (time.perf_counter() - begun)
            known = {part: of["result"] for part, of in report["parts"].items()}
            if left > 5:
                found = start_part(name, chosen.smoke, known, min(left, PARTS[name][1]), log)
            else:
                found = {"ended": "no time was left", "seconds": 0.0, "result": {}}
            report["parts"][name] = found
            report["seconds"] = round(time.perf_counter() - begun, 1)
            print(f"{name}: {found['ended']}, {found['seconds']} s", file=sys.stderr)
            (chosen.out / "card.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))
    return int(any(part["ended"] != "ok" for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
