"""Every codec of ours against every codec of hivemind, and what codecs cost in loss.

`table`: ratio, error (L2, relative) and speed (GB/s of the tensors, one thread, in turns, medians) on tensors captured
from training, normal numbers, and hidden states two of whose channels stand out, as in large models (arXiv:2208.07339).
`encode` ends where the library hands over to its transport (ours: memory, hivemind's: a protobuf message), `decode`
begins there; `encode_to_bytes` ends with a byte string.

`loss`: nats a byte that codecs of what passes between 5 stages, in both directions, cost a small model.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

os.environ["QUANTIZATION_THREADS"] = "1"  # hivemind's quantiles, which otherwise take up to 128 threads
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hivemind.compression.quantization as their_quantization
import numpy as np
import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.proto import runtime_pb2
from torch import Tensor, nn

from benchmarks import kit
from benchmarks.kit import READER, Learner, evaluate, run_of, source_of, tell
from node.data.feed import TrainingFeed, held_out_microbatches, open_documents
from node.data.packing import Microbatch
from node.model import passes
from node.model.initialization import parameters_of
from node.pipeline.admission import hidden_tensor
from node.runtime.malloc import keep_freed_memory
from protocol import codecs
from protocol.interfaces.tensor_spec import TensorSpec
from protocol.manifest.manifest import Manifest
from swarm.vocabulary.types import Codec

Sent = tuple[bytes | bytearray, TensorSpec | None]  # data, and the contents of our header of some 30 bytes


class Ours:
    def __init__(self, codec: Codec) -> None:
        self.codec, self.name = codec, f"skipstone.{codec.name}"

    def encode(self, values: Tensor) -> codecs.Encoded:
        return codecs.encode(values, self.codec)

    def to_bytes(self, encoded: codecs.Encoded) -> Sent:
        return bytearray(encoded.data), encoded.spec

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

    def decode(self, sent: Sent, out: Tensor) -> Tensor:
        return deserialize_torch_tensor(runtime_pb2.Tensor.FromString(sent[0]))


Contender = Ours | Theirs


def frombuffer_as_before(*arguments: Any, **options: Any) -> Any:
    """`numpy.frombuffer` that gives the element itself for a count of 1: hivemind's 8-bit codecs fail from 2.4 on."""
    found = np.frombuffer(*arguments, **options)
    return found[0] if options.get("count") == 1 else found


OUTLIERS: Final = {17: 60.0, 101: 25.0}  # channels of hidden states, and their factors
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
    feed, learner = TrainingFeed(manifest, open_documents(manifest), READER), Coded(manifest, Codec.NONE)
    for _ in range(options.steps):
        learner.step([feed.next()])
    seen: list[list[Tensor]] = []
    for _ in range(8):
        learner.gradients(feed.next())
        seen.append(list(learner.seen))
    passed = [torch.cat(parts) for parts in zip(*seen, strict=True)]
    hidden, gradients = passed[: len(passed) // 2], passed[len(passed) // 2 :]
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


def flat(learner: Learner) -> Tensor:
    """A copy of all parameters, [elements]."""
    parameters = (tensor for parts in learner.modules for _, tensor in sorted(parameters_of(*parts).items()))
    return torch.cat([tensor.detach().flatten() for tensor in parameters])


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
    out, received = torch.empty_like(values), contender.to_bytes(contender.encode(values))
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


def measure_table(options: Any) -> dict[str, Any]:
    keep_freed_memory()
    classes = captured(options)
    names = runtime_pb2.CompressionType.keys()
    contenders: list[Contender] = [*map(Ours, Codec), *map(Theirs, names)]
    rows: dict[str, dict[str, Any]] = {}
    their_quantization.np = SimpleNamespace(**{**vars(np), "frombuffer": frombuffer_as_before})
    for one in contenders:
        tell(f"accuracy of {one.name}")
        rows[one.name] = {name: attempt(lambda: accuracy(one, of)) for name, of in classes.items()}  # noqa: B023
        rows[one.name]["speed"] = {}
    for name in TIMED:
        values = classes[name][len(classes[name]) // 2]
        for contender, found in speeds(contenders, values, options.rounds).items():
            rows[contender]["speed"][name] = found
    return {"contenders": rows}


class Coded(Learner):
    """All stages in one process; tensors between stages go through a codec, forward and backward."""

    def __init__(self, manifest: Manifest, codec: Codec) -> None:
        super().__init__(manifest)
        self.codec, self.sent_bytes, self.seen = codec, 0, list[Tensor]()  # seen: of the last microbatch

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


BOUNDARIES: Final = (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4)


def loss_run(options: Any, seed: int) -> Manifest:
    size = {"hidden": 16, "sequence": 16} if options.quick else {"hidden": 64, "sequence": 64}
    schedule = {"kind": "cosine", "warmup_steps": min(40, options.loss_steps // 2), "total_steps": options.loss_steps}
    data = {"source": source_of(options.text), "held_out": 0.1}
    inner = {"learning_rate": 4e-3}
    size |= {"rows": 8, "microbatches": 1, "seed": seed}
    return run_of("codecs", [0, 1, 1, 1, 1], **size, data=data, inner=inner, schedule=schedule)


def coded_boundaries(options: Any, codec: Codec, seed: int) -> dict[str, float]:
    manifest = loss_run(options, seed)
    documents = open_documents(manifest)
    feed, learner = TrainingFeed(manifest, documents, READER), Coded(manifest, codec)
    for _ in range(options.loss_steps):
        learner.step([feed.next()])
    per_token = learner.sent_bytes / (options.loss_steps * manifest.microbatch_tokens)
    loss = evaluate(learner.loss, held_out_microbatches(manifest, 32, documents))["loss"]
    return {"loss": loss, "bytes_a_token": per_token}


def measure_hop(_: Any) -> dict[str, float]:
    """Bytes of a token forward and backward at width 1024: 64 numbers in INT8 with the token's, or all, per codec."""
    found: dict[str, float] = {}
    for residual, codec in ((64, Codec.INT8), (0, Codec.INT8), (0, Codec.BF16), (0, Codec.NONE)):
        model = {"residual": residual, "vocabulary": 65_536}
        run = run_of("hop", [0, 1], hidden=1024, sequence=1024, rows=4, microbatches=1, model=model)
        sent = [replace(hidden_tensor(run), codec=codec, **back).byte_length for back in ({}, {"token_bytes": 0})]
        found[f"{codec.name} of {residual or 1024}"] = sum(sent) / run.microbatch_tokens
    return found


def measure_loss(options: Any) -> dict[str, Any]:
    rows = {arm.name: [coded_boundaries(options, arm, seed) for seed in options.seeds] for arm in BOUNDARIES}
    dense = [row["loss"] for row in rows["NONE"]]
    for of in rows.values():
        for row, without in zip(of, dense, strict=True):
            row["behind"] = row["loss"] - without
    found = {arm: kit.medians(of) for arm, of in rows.items()}
    tell(found)
    return found


if __name__ == "__main__":
    usual = {"rounds": 7, "steps": 200, "loss_steps": 600, "seeds": [1, 2], "text": Path}
    quick = {"rounds": 1, "steps": 4, "loss_steps": 4, "seeds": [1]}
    torch.set_num_threads(1)
    kit.run(__doc__, {"table": measure_table, "hop": measure_hop, "loss": measure_loss}, quick, **usual)
