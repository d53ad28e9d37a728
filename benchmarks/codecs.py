"""Every codec of ours against every codec of hivemind, and what codecs cost in loss.

`table`: ratio, error (L2, relative) and speed (GB/s of the tensors, one thread, in turns, medians) on tensors captured
from training, normal numbers, and hidden states two of whose channels stand out, as in large models (arXiv:2208.07339).
`encode` ends where the library hands over to its transport (ours: memory, hivemind's: a protobuf message), `decode`
begins there; `encode_to_bytes` ends with a byte string. `error_spread` is the largest over the smallest error for a
root mean square from 1e-7 to 1e+3. `targets` are for a machine that does nothing else.

`loss`: nats a byte that codecs cost a small model. `boundaries`: what passes between 5 stages is encoded, in both
directions; `rounds`: 2 workers average every 10 steps, and what the encoding of a pseudo-gradient leaves out stays in
the replica, as in the node.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

os.environ["QUANTIZATION_THREADS"] = "1"  # hivemind's quantiles, which otherwise take up to 128 threads
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hivemind.compression.quantization as their_quantization
import numpy as np
import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from benchmarks import kit
from benchmarks.kit import READER, Learner, run_of, source_of, tell
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Microbatch
from node.model import passes
from node.model.initialization import parameters_of
from node.runtime.malloc import keep_freed_memory
from node.solo.trainer import evaluate
from protocol import codecs
from protocol.codecs import decode_into, encode_into, encoded_bytes
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import Codec

# ---- contenders ------------------------------------------------------------------------------------------------------

Sent = tuple[bytes | bytearray, TensorSpec | None]
"""What the other side gets: the data, and what our header of some 30 bytes says."""


class Contender(Protocol):
    """One codec; `received` is what the library's own transport gives to `decode`."""

    name: str

    def encode(self, values: Tensor) -> Any: ...
    def to_bytes(self, encoded: Any) -> Sent: ...
    def received(self, sent: Sent) -> Sent: ...
    def decode(self, sent: Sent, out: Tensor) -> Tensor: ...


class Ours:
    def __init__(self, codec: Codec) -> None:
        self.codec, self.name = codec, f"skipstone.{codec.name}"

    def encode(self, values: Tensor) -> codecs.Encoded:
        return codecs.encode(values, self.codec)

    def to_bytes(self, encoded: codecs.Encoded) -> Sent:
        return bytes(encoded.data), encoded.spec

    def received(self, sent: Sent) -> Sent:
        return bytearray(sent[0]), sent[1]

    def decode(self, sent: Sent, out: Tensor) -> Tensor:
        assert sent[1] is not None
        codecs.decode(sent[1], memoryview(sent[0]), out)
        return out


class Theirs:
    def __init__(self, compression: str) -> None:
        self.compression, self.name = compression, f"hivemind.{compression}"

    def encode(self, values: Tensor) -> Any:
        return serialize_torch_tensor(values, runtime_pb2.CompressionType.Value(self.compression))

    def to_bytes(self, encoded: Any) -> Sent:
        return encoded.SerializeToString(), None

    def received(self, sent: Sent) -> Sent:
        return sent

    def decode(self, sent: Sent, out: Tensor) -> Tensor:
        return deserialize_torch_tensor(runtime_pb2.Tensor.FromString(sent[0]))


class _NumPyAsBefore(types.ModuleType):
    """numpy whose `frombuffer` gives the element itself when count is 1: hivemind's 8-bit codecs fail from 2.4 on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def frombuffer(*arguments: Any, **options: Any) -> Any:
        found = np.frombuffer(*arguments, **options)
        return found[0] if options.get("count") == 1 else found


@contextmanager
def with_workaround() -> Iterator[None]:
    their_quantization.np = _NumPyAsBefore("numpy")
    try:
        yield
    finally:
        their_quantization.np = np


# ---- tensors ---------------------------------------------------------------------------------------------------------

OUTLIERS: Final = {17: 60.0, 101: 25.0}
"""Channels of hidden states, and how many times larger they are made."""
MAGNITUDES: Final = tuple(10.0**exponent for exponent in range(-7, 4))
TIMED: Final = ("activations", "pseudo_gradient", "outliers")


def captured(options: Any) -> dict[str, list[Tensor]]:
    """Tensors of a small llama in training, by class; hidden states are of 8 microbatches together."""
    size = {"hidden": 32, "sequence": 32} if options.quick else {"hidden": 256, "sequence": 128}
    manifest = run_of(
        "codecs",
        [1] * 6,
        **size,
        heads=8,
        rows=8,
        microbatches=1,
        data={"source": source_of(options.text)},
        inner={"learning_rate": 2e-3},
        schedule={"kind": "constant", "warmup_steps": max(1, options.steps // 10), "total_steps": options.steps + 1},
    )
    feed, learner = TrainingFeed(manifest, open_documents(manifest), READER), Learner(manifest)
    for _ in range(options.steps):
        learner.step([feed.next()])
    borders = [at_borders(learner, feed.next()) for _ in range(8)]
    hidden, gradients = ([torch.cat(parts) for parts in zip(*of, strict=True)] for of in zip(*borders, strict=True))
    before = flat(learner)
    for _ in range(20):
        learner.step([feed.next()])
    outliers = hidden[len(hidden) // 2].clone()
    for channel, factor in OUTLIERS.items():
        outliers[..., channel % manifest.model.hidden] *= factor
    return {
        "activations": hidden,
        "activation_gradients": gradients,
        "pseudo_gradient": [before - flat(learner)],
        "parameters": [flat(learner)],
        "bf16_parameters": [flat(learner).bfloat16()],
        "normal": [torch.randn(hidden[0].shape, generator=torch.Generator().manual_seed(1))],
        "outliers": [outliers],
    }


def at_borders(learner: Learner, microbatch: Microbatch) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states and the gradients that come back, [rows, tokens, hidden], at each border between stages."""
    coded = Coded(learner.manifest, Codec.NONE, learner)
    coded.gradients(microbatch)
    borders = len(coded.model.stacks) + 1
    return coded.seen[:borders], coded.seen[: borders - 1 : -1]


def parameters_in_order(learner: Learner) -> list[Tensor]:
    return [tensor for parts in learner.modules for _, tensor in sorted(parameters_of(*parts).items())]


def flat(learner: Learner) -> Tensor:
    """A copy of all parameters, [elements]."""
    return torch.cat([tensor.detach().flatten() for tensor in parameters_in_order(learner)])


# ---- the table -------------------------------------------------------------------------------------------------------


def attempt(call: Callable[[], Any]) -> Any:
    """The result, or what went wrong in one line."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def accuracy(contender: Contender, tensors: Sequence[Tensor]) -> dict[str, float]:
    sent_bytes, wrong, whole = 0, 0.0, 0.0
    for values in tensors:
        sent = contender.to_bytes(contender.encode(values))
        sent_bytes += len(sent[0])
        wrong += float((contender.decode(sent, torch.empty_like(values)).double() - values.double()).square().sum())
        whole += float(values.double().square().sum())
    ratio = sum(values.nbytes for values in tensors) / sent_bytes
    return {"ratio": round(ratio, 3), "error": float(f"{math.sqrt(wrong / whole):.4g}")}


def error_spread(contender: Contender) -> float:
    numbers = torch.randn(1024, 256, generator=torch.Generator().manual_seed(2))
    errors = [accuracy(contender, [numbers * size])["error"] for size in MAGNITUDES]
    return round(max(errors) / min(errors), 4) if min(errors) else 1.0


def speeds(contenders: Sequence[Contender], values: Tensor, rounds: int) -> dict[str, dict[str, float | None]]:
    """GB/s by contender and operation; each operation twice a turn, of which the second counts."""
    seconds: dict[str, dict[str, list[float]]] = {contender.name: {} for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            attempt(lambda one=contender: _take_turn(one, values, seconds[one.name]))
    size = values.nbytes / 1e9
    return {
        name: {operation: round(size / statistics.median(times), 3) for operation, times in found.items()}
        for name, found in seconds.items()
    }


def _take_turn(contender: Contender, values: Tensor, seconds: dict[str, list[float]]) -> None:
    out, received = torch.empty_like(values), contender.received(contender.to_bytes(contender.encode(values)))
    calls: dict[str, Callable[[], Any]] = {
        "encode": lambda: contender.encode(values),
        "encode_to_bytes": lambda: contender.to_bytes(contender.encode(values)),
        "decode": lambda: contender.decode(received, out),
    }
    for operation, call in calls.items():
        call()
        begun = time.perf_counter()
        call()
        seconds.setdefault(operation, []).append(time.perf_counter() - begun)


LOSSY: Final = ("activations", "activation_gradients", "pseudo_gradient", "normal")
TARGETS: Final = {
    "INT8": {"ratio": 3.85, "error": 7e-3, "encode": 3.5, "decode": 6.0},
    "INT4": {"ratio": 7.1, "error": 0.105, "encode": 1.8, "decode": 3.5},
    "BF16": {"encode": 8.0, "decode": 8.0},
}
"""Ratios and speeds: at least; errors: at most."""


def targets(rows: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was to be reached by the worst class (of two for speeds), and what was."""
    found = []
    for codec, bounds in TARGETS.items():
        row = rows[f"skipstone.{codec}"]
        for key, bound in bounds.items():
            speed = key in ("encode", "decode")
            values = [row["speed"][name][key] for name in TIMED[:2]] if speed else [row[name][key] for name in LOSSY]
            value = max(values) if key == "error" else min(values)
            met = value <= bound if key == "error" else value >= bound
            found.append({"target": f"{codec}: {key}", "bound": bound, "measured": value, "met": met})
    return found


def measure_table(options: Any) -> dict[str, Any]:
    keep_freed_memory()
    classes = captured(options)
    names = runtime_pb2.CompressionType.keys()
    contenders: list[Contender] = [*map(Ours, Codec), *map(Theirs, names)]
    rows: dict[str, dict[str, Any]] = {}
    with with_workaround():
        for one in contenders:
            tell(f"accuracy of {one.name}")
            rows[one.name] = {name: attempt(lambda: accuracy(one, of)) for name, of in classes.items()}  # noqa: B023
            rows[one.name] |= {"error_spread": attempt(lambda: error_spread(one)), "speed": {}}  # noqa: B023
        for name in TIMED:
            values = classes[name][len(classes[name]) // 2]
            for contender, found in speeds(contenders, values, options.rounds).items():
                rows[contender]["speed"][name] = found
    return {"contenders": rows, "targets": targets(rows)}


# ---- loss ------------------------------------------------------------------------------------------------------------


class Coded(Learner):
    """All stages in one process; what a stage hands on, forward and backward, goes through a codec."""

    def __init__(self, manifest: Manifest, codec: Codec, other: Learner | None = None) -> None:
        super().__init__(manifest)
        self.codec, self.sent_bytes, self.seen = codec, 0, list[Tensor]()
        """`seen` has what was handed on for the last microbatch."""
        if other is not None:
            self.follow(other)

    def gradients(self, microbatch: Microbatch) -> tuple[float, dict[nn.Module, tuple[Tensor, ...]]]:
        self.seen.clear()
        visits = [passes.forward(self.model.embedding, microbatch.tokens)]
        for stack in self.model.stacks:
            visits.append(passes.forward(stack, self._sent(visits[-1].result)))
        end = passes.forward(self.model.head, self._sent(visits[-1].result), microbatch.labels)
        found = passes.backward(self.model.head, end)
        gradients: dict[nn.Module, tuple[Tensor, ...]] = {self.model.head: found.parameters}
        for part in [*reversed(self.model.stacks), self.model.embedding]:
            assert found.source is not None
            found = passes.backward(part, visits.pop(), self._sent(found.source))
            gradients[part] = found.parameters
        return end.result.item(), gradients

    def loss(self, microbatch: Microbatch) -> float:
        """Mean nats per token, through the codec."""
        with torch.no_grad():
            hidden = self.model.embedding(microbatch.tokens)
            for stack in self.model.stacks:
                hidden = stack(self._sent(hidden))
            return float(self.model.head(self._sent(hidden), microbatch.labels).item())

    def _sent(self, values: Tensor) -> Tensor:
        values = values.detach().contiguous()
        sent, out = codecs.encode(values, self.codec), torch.empty_like(values)
        codecs.decode(sent.spec, sent.data, out)
        self.sent_bytes += sent.spec.byte_length
        self.seen.append(out)
        return out

    def follow(self, other: Learner) -> None:
        """Becomes a copy of the other, its optimizers' states included."""
        pairs = zip(self.modules, self.optimizers, other.modules, other.optimizers, strict=True)
        for own, optimizer, those, its in pairs:
            theirs = parameters_of(*those)
            for name, tensor in parameters_of(*own).items():
                tensor.detach().copy_(theirs[name].detach())
            optimizer.import_state(parameters_of(*own), its.export_state(theirs))


def passed(codec: Codec, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the others have of a vector."""
    data, out = memoryview(bytearray(encoded_bytes(codec, len(values)))), np.empty_like(values)
    encode_into(codec, values, data)
    decode_into(codec, data, out)
    return out


def average(workers: Sequence[Coded], anchor: np.ndarray[Any, Any], codec: Codec) -> None:
    """A round, by the plain mean; what the encodings leave out stays in the workers."""
    gradients = [anchor - flat(worker).numpy() for worker in workers]
    decoded = [passed(codec, gradient) for gradient in gradients]
    anchor -= np.mean(decoded, axis=0)
    for worker, gradient, sent in zip(workers, gradients, decoded, strict=True):
        write(worker, anchor - (gradient - sent))


def write(learner: Learner, values: np.ndarray[Any, Any]) -> None:
    vector_to_parameters(torch.from_numpy(values.copy()), parameters_in_order(learner))


ROUND_STEPS: Final = 10
COMMON_STEPS: Final = 100
BOUNDARIES: Final = (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4, Codec.TOP_K_4)
CONTRIBUTIONS: Final = (Codec.NONE, Codec.INT8, Codec.INT4, Codec.TOP_K_4, Codec.TOP_K_2)


def loss_run(options: Any, blocks: Sequence[int], seed: int) -> Manifest:
    size = {"hidden": 16, "sequence": 16} if options.quick else {"hidden": 64, "sequence": 64}
    schedule = {"kind": "cosine", "warmup_steps": min(40, options.loss_steps // 2), "total_steps": options.loss_steps}
    data = {"source": source_of(options.text), "held_out": 0.1}
    inner = {"learning_rate": 4e-3}
    return run_of(
        "codecs", blocks, **size, rows=8, microbatches=1, seed=seed, data=data, inner=inner, schedule=schedule
    )


def coded_boundaries(options: Any, codec: Codec, seed: int) -> dict[str, float]:
    manifest = loss_run(options, [0, 1, 1, 1, 1], seed)
    documents = open_documents(manifest)
    feed, learner = TrainingFeed(manifest, documents, READER), Coded(manifest, codec)
    for _ in range(options.loss_steps):
        learner.step([feed.next()])
    per_token = learner.sent_bytes / (options.loss_steps * manifest.microbatch_tokens)
    return {
        "loss": evaluate(learner, held_out_microbatches(manifest, 32, documents))["loss"],
        "bytes_a_token": per_token,
    }


def coded_rounds(options: Any, codec: Codec, seed: int) -> dict[str, float]:
    manifest = loss_run(options, [2], seed)
    documents = open_documents(manifest)
    feed, start = TrainingFeed(manifest, documents, READER), Coded(manifest, Codec.NONE)
    common = min(COMMON_STEPS, options.loss_steps // 2)
    for _ in range(common):
        start.step([feed.next()])
    workers, anchor = [Coded(manifest, Codec.NONE, start) for _ in range(2)], flat(start).numpy()
    for step in range(common + 1, options.loss_steps + 1):
        for worker in workers:
            worker.step([feed.next()])
        if (step - common) % ROUND_STEPS == 0 or step == options.loss_steps:
            average(workers, anchor, codec)
    write(workers[0], anchor)
    ratio = anchor.nbytes / encoded_bytes(codec, len(anchor))
    return {"loss": evaluate(workers[0], held_out_microbatches(manifest, 32, documents))["loss"], "ratio": ratio}


def measure_loss(options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    tables = {"boundaries": (coded_boundaries, BOUNDARIES), "rounds": (coded_rounds, CONTRIBUTIONS)}
    for table, (train, arms) in tables.items():
        rows = {arm.name: [train(options, arm, seed) for seed in options.seeds] for arm in arms}
        dense = [row["loss"] for row in rows["NONE"]]
        found[table] = {}
        for arm, of in rows.items():
            behind = [row["loss"] - without for row, without in zip(of, dense, strict=True)]
            found[table][arm] = kit.medians(of) | {"behind": statistics.mean(behind)}
            tell(table, arm, found[table][arm])
    return found


def measure(options: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    parts = {"table": measure_table, "loss": measure_loss}
    return {part: parts[part](options) for part in options.parts}


def main() -> None:
    usual = {"rounds": 7, "steps": 200, "loss_steps": 600, "seeds": [1, 2], "text": Path}
    quick = {"rounds": 1, "steps": 4, "loss_steps": 4, "seeds": [1]}
    kit.run(__doc__, measure, quick, parts=("table", "loss"), **usual)


if __name__ == "__main__":
    main()
