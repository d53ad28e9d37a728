"""Every kind of job on the pretend device and on the CPU, in a process of its own: waits and differences, as JSON."""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from node.averaging.anchor.outer_step import LocalReplica
from node.checkpoint.saver import capture_module, restore_module
from node.model import initialization
from node.model.initialization import floats_of, parameters_of
from node.model.moments import ORDINARY, Allowance, MomentType
from node.pipeline.device_passes import BlockByBlock
from node.pipeline.runner import Job, Output
from node.pipeline.worker import DataWorker, host_hop, host_stage_zero, measure_speed
from protocol.codecs import Encoded, encode
from protocol.codecs.memory import buffer_for
from protocol.manifest.manifest import Manifest
from swarm.pipeline.custody import Key, Work
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.kit.hops import CPU, HopBench, sent
from tests.node.device.pretend import DEVICE, METER, pinned, pretended
from tests.node.network.small_swarm import text_of
from tests.node.small_manifest import small_manifest

Allocate = Callable[[int], memoryview]
MANY_GRAPHS: Final = 2**30
HAS_OUTLIER: Final = 3
STANDS_OUT: Final = 5


def arrived(encoded: Encoded, allocate: Allocate) -> Encoded:
    buffer = allocate(encoded.data.nbytes)
    buffer[:] = encoded.data
    return Encoded(encoded.spec, buffer)


class Hop(HopBench):
    def __init__(
        self,
        manifest: Manifest,
        device: torch.device,
        codec: Codec,
        budget: int = MANY_GRAPHS,
        allowance: Allowance = ORDINARY,
        allocate: Allocate | None = None,
    ) -> None:
        super().__init__(host_hop(manifest, ModuleId(1), device, budget, allowance), manifest)
        self.codec = codec
        self._allocate = allocate or partial(buffer_for, device=device)

    def source(self, number: int, documents: tuple[int, ...] = ()) -> Tensor:
        source = super().source(number, documents)
        if number % 100 == HAS_OUTLIER:
            source[..., STANDS_OUT] *= 40
        return source

    def job(self, work: Work, number: int, **more: Any) -> Job:
        return replace(super().job(work, number, **more), codec=self.codec)

    def _received(self, tensor: Tensor, numbers: Tensor | None = None) -> Encoded:
        return arrived(encode(tensor, self.codec), self._allocate)


NO_GRAPHS: Final = 0
CODECS: Final = (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4)
WIDE: Final = {"vocabulary": 257, "hidden": 128, "heads": 4, "kv_heads": 2, "feed_forward": 384, "sequence": 8}


@dataclass
class Record:
    """What was seen: by job the waits, and by name the numbers that both devices computed."""

    waits: dict[str, dict[str, int]] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def job(self, name: str) -> Iterator[None]:
        METER.waits.clear()
        yield
        self.waits[name] = dict(METER.waits)

    def note(self, name: str, tensor: Tensor) -> None:
        self.numbers[name] = tensor.detach().to("cpu", torch.float32)


def _buffers(device: torch.device) -> Allocate:
    return pinned if device == DEVICE else partial(buffer_for, device=device)


def hop_jobs(manifest: Manifest, device: torch.device, codec: Codec, record: Record) -> None:
    hop, tag = Hop(manifest, device, codec, allocate=_buffers(device)), codec.name
    hop.visit(0)  # the first is measured, which is another way
    for work in (Work.FORWARD, Work.BACKWARD):
        with record.job(f"{work.name} {tag}"):
            record.note(f"hop {work.name} {tag}", hop.compute(work, 1))
    with record.job(f"EVALUATE {tag}"):
        record.note(f"hop EVALUATE {tag}", hop.forward(2, purpose=Purpose.EVALUATE))
    with record.job(f"REPLAY {tag}"):
        record.note(f"hop REPLAY {tag}", hop.compute(Work.REPLAY, 3))
    with record.job(f"retract {tag}"):
        assert hop.worker.retract(hop.job(Work.REPLAY, 3))
    hop.forward(4)
    with record.job(f"step {tag}"):
        assert hop.worker.step() is not None
    with record.job(f"BACKWARD recomputed {tag}"):
        record.note(f"hop BACKWARD recomputed {tag}", hop.backward(4))
    for name, floats in floats_of(hop.worker.part).items():
        record.note(f"{name} {tag}", floats if isinstance(floats, Tensor) else floats.copied())


def upkeep_jobs(manifest: Manifest, device: torch.device, moments: MomentType, record: Record) -> None:
    tag = moments.value
    hop = Hop(manifest, device, Codec.NONE, allowance=Allowance(moments=moments))
    part, optimizer = hop.worker.part, hop.worker.optimizer

    def stepped(first: int) -> None:
        for number in (first, first + 1):
            hop.visit(number)
        assert hop.worker.step() is not None

    stepped(0)
    replica = LocalReplica([part], 1, optimizer, hop.worker.parameters_changed)
    whole = slice(0, replica.layout.elements)
    snapshot, after = (np.empty(whole.stop, np.float32) for _ in range(2))
    with record.job(f"snapshot {tag}"):
        replica.read(whole, snapshot)
    record.note(f"snapshot {tag}", torch.from_numpy(snapshot.copy()))
    new = snapshot * np.float32(0.5)
    with record.job(f"carry {tag}"):
        replica.carry(whole, snapshot, new)
    replica.read(whole, after)
    assert np.array_equal(after, new), "what has not changed since the snapshot is exactly the new anchor"
    with record.job(f"capture {tag}"):
        state = capture_module((part,), optimizer, visits=2, tokens=2 * manifest.microbatch_tokens)
    stepped(2)
    with record.job(f"restore {tag}"):
        restore_module((part,), optimizer, state)
    again = capture_module((part,), optimizer, visits=2, tokens=2 * manifest.microbatch_tokens)
    for name, saved in again.inner.parameters.items():
        for slot, tensor in saved.tensors.items():
            assert torch.equal(tensor, state.inner.parameters[name].tensors[slot]), f"{slot} of {name}"
            record.note(f"{slot} {name} {tag}", tensor)
    with record.job(f"measure speed {tag}"):
        assert measure_speed(hop.worker.passes, manifest, device) > 0


def data_jobs(manifest: Manifest, device: torch.device, codec: Codec, record: Record) -> None:
    worker: DataWorker = host_stage_zero(manifest, device)
    tag = codec.name

    def compute(number: int, work: Work, incoming: Tensor | None = None, purpose: Purpose = Purpose.TRAIN) -> Output:
        microbatch = MicrobatchId(PeerId("data"), number)
        worker.texts[microbatch] = text_of(manifest, number)
        data = None if incoming is None else arrived(encode(incoming, codec), _buffers(device))
        forth, back = (None, data) if work is Work.BACKWARD else (data, None)
        return worker.compute(Job(number, Key(microbatch, 0), work, purpose, forth, back, codec=codec))

    for number in (0, 1):
        with record.job(f"embed {tag}"):
            hidden = sent(compute(number, Work.FORWARD))
        record.note(f"embed {number} {tag}", hidden)
        with record.job(f"loss {tag}"):
            turned = compute(number, Work.LOSS, hidden)
        assert turned.loss is not None
        record.note(f"loss {number} {tag}", torch.tensor(turned.loss))
        record.note(f"gradient {number} {tag}", sent(turned))
        with record.job(f"finish {tag}"):
            compute(number, Work.BACKWARD, sent(turned))
    with record.job(f"evaluate loss {tag}"):
        evaluated = compute(2, Work.LOSS, hidden, Purpose.EVALUATE)
    assert evaluated.loss is not None
    record.note(f"evaluated {tag}", torch.tensor(evaluated.loss))
    with record.job(f"step of stage 0 {tag}"):
        assert worker.step() is not None
    for name, parameter in parameters_of(worker.stage.embedding, worker.stage.head).items():
        record.note(f"{name} of stage 0 {tag}", parameter)


def all_jobs(manifest: Manifest, device: torch.device) -> Record:
    record = Record()
    for codec in CODECS:
        hop_jobs(manifest, device, codec, record)
        data_jobs(manifest, device, codec, record)
    for moments in MomentType:
        upkeep_jobs(manifest, device, moments, record)
    return record


def parameter_bytes(moments: MomentType) -> dict[str, float]:
    """Bytes of the device for each parameter of a hop, in a bfloat16 run of next to no activations."""
    training = {"training__rows": 1, "training__inner_tokens": 2 * WIDE["sequence"]}
    manifest = small_manifest(model={**WIDE, "dtype": "bfloat16"}, stages={"blocks": [1, 8]}, **training)
    found: dict[str, float] = {}
    gc.collect()
    before = METER.live
    hop = Hop(manifest, DEVICE, Codec.NONE, NO_GRAPHS, Allowance(moments=moments))
    count = sum(parameter.numel() for parameter in hop.worker.part.parameters())

    def metered(name: str, job: Callable[[], Any]) -> None:
        METER.start()
        job()
        found[name] = max(found.get(name, 0.0), (METER.peak - before) / count)

    number = 0
    for _ in range(2):
        while not hop.worker.optimizer.due:
            number += 1
            metered("forward", partial(hop.forward, number))
            metered("backward", partial(hop.backward, number))
        hop.forward(number + 1000)
        metered("step", hop.worker.step)
        metered("recomputed backward", partial(hop.backward, number + 1000))
    found["resident"] = (METER.live - before) / count
    return found


def graph_bytes() -> dict[str, float]:
    """Device bytes of a kept visit for each token, block and unit of width, by the number of blocks with graphs."""
    manifest = small_manifest(model={**small_table(), "dtype": "bfloat16"}, stages={"blocks": [1, 4]})
    hop = Hop(manifest, DEVICE, Codec.NONE)
    passes = hop.worker.passes
    assert isinstance(passes, BlockByBlock)
    source = hop.source(1).to(DEVICE)
    passes.forward(source, ())  # what is made once, is
    found: dict[str, float] = {}
    for graphs in range(passes.blocks + 1):
        gc.collect()
        before = METER.live
        visit = passes.forward(source, (), graphs=graphs).kept()
        gc.collect()
        found[str(graphs)] = (METER.live + source.nbytes - before) / (source.numel() * passes.blocks)
        del visit
    return found


def dropped_graph_bytes() -> int:
    """Bytes of the device that are left of a first visit, whose graph was measured, when it has been forgotten."""
    hop = Hop(small_manifest(model__dtype="bfloat16"), DEVICE, Codec.NONE, NO_GRAPHS)
    hop.forward(1, purpose=Purpose.EVALUATE)  # which leaves the angles of its tokens
    gc.collect()
    before = METER.live
    hop.forward(0)
    hop.worker.forget(0)
    gc.collect()
    return METER.live - before


def main() -> None:
    answer: dict[str, Any] = {}
    initialization.writes = lambda name: False  # new blocks are the identity, which would hide what they do
    for dtype in ("float32", "bfloat16"):
        manifest = small_manifest(model={**small_table(), "dtype": dtype})
        wanted = all_jobs(manifest, CPU)
        with pretended():
            found = all_jobs(manifest, DEVICE)
        assert found.numbers.keys() == wanted.numbers.keys()
        answer[dtype] = {
            "waits": found.waits,
            "differences": {
                name: ((tensor - wanted.numbers[name]).abs().max() / wanted.numbers[name].abs().max()).item()
                for name, tensor in found.numbers.items()
            },
        }
    with pretended():
        answer["bytes"] = {moments.value: parameter_bytes(moments) for moments in MomentType}
        answer["graph"] = graph_bytes()
        answer["dropped"] = dropped_graph_bytes()
    print(json.dumps(answer))


def small_table() -> dict[str, Any]:
    return {"vocabulary": 257, "hidden": 64, "heads": 4, "kv_heads": 2, "feed_forward": 96, "sequence": 16}


if __name__ == "__main__":
    main()
