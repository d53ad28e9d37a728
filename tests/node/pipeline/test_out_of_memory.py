"""A machine that runs out of memory (a child process with a limit) loses a microbatch, not the node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")

ROOT = Path(__file__).parent.parent.parent.parent

PROGRAM = """
import resource
from contextlib import contextmanager
import numpy as np
import torch
from node.pipeline.worker import HopWorker, host_stage_zero
from node.model.optimizer import Accumulator, InnerOptimizer
from node.model.device import device_errors
from node.pipeline.runner import Job
from protocol.codecs import encode
from protocol.interfaces.tensor_spec import DType, TensorSpec
from swarm.vocabulary.errors import ResourceExhausted
from swarm.pipeline.custody import Key, Work
from swarm.vocabulary.pipeline_messages import Purpose
from swarm.vocabulary.types import Codec, MicrobatchId, ModuleId, PeerId
from tests.node.small_manifest import small_manifest

torch.set_num_threads(1)
MIB = 2**20

@contextmanager
def memory_left(left):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + left, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

def refused(job):
    try:
        with device_errors():
            job()
    except ResourceExhausted as error:
        assert "out of memory" in str(error), error
    else:
        raise SystemExit("there was memory enough")

with memory_left(8 * MIB):
    refused(lambda: torch.empty(2**28))
    refused(lambda: np.empty(2**28))
    refused(lambda: bytearray(2**30))
    refused(lambda: torch.ones(2**24, dtype=torch.uint8).to(torch.float64).sum())
    try:
        host_stage_zero(small_manifest(model__vocabulary=1_000_000, model__hidden=1024), torch.device("cpu"))
    except ResourceExhausted as error:
        assert str(error).startswith("module 0.0 takes"), error
        assert str(error).endswith("under this process's address space limit"), error
    else:
        raise SystemExit("there was room for a module")

rows, width = 256, 1024
layers = torch.nn.Linear(width, 64), torch.nn.Tanh(), torch.nn.Linear(64, width), torch.nn.Linear(width, width)

class Part(torch.nn.Sequential):
    def forward(self, hidden, documents=()):
        return super().forward(hidden)

part = Part(*layers)
manifest = small_manifest()
sums = Accumulator(part)
optimizer, tensor = InnerOptimizer(manifest, ModuleId(0), [sums]), TensorSpec((rows, width), DType.FLOAT32)
worker = HopWorker(part, sums, optimizer, tensor, torch.device("cpu"), 2**30)
source = torch.randn(rows, width)

def job(number, work):
    data = encode(source, Codec.NONE)
    tensors = dict(gradient=data) if work is Work.BACKWARD else dict(input=data)
    return Job(number, Key(MicrobatchId(PeerId("data"), number), 0), work, Purpose.TRAIN, **{"input": None, **tensors})

def visit(number):
    worker.compute(job(number, Work.FORWARD))
    worker.compute(job(number, Work.BACKWARD))

def sum_of_all():
    return torch.cat([total.flatten() for total in sums.sums])

visit(0)
once = sum_of_all()
outcomes = set()
for left in range(0, 120, 4):  # whatever it is that does not fit: activations, gradients, the wider copies for the sum
    number = left + 1
    before = sum_of_all()
    worker.compute(job(number, Work.FORWARD))
    outcome = "computed"
    with memory_left(left * MIB // 4):
        try:
            worker.compute(job(number, Work.BACKWARD))
        except ResourceExhausted:
            outcome = "refused"
    outcomes.add(outcome)
    assert sums.has(MicrobatchId(PeerId("data"), number)) == (outcome == "computed")
    assert torch.equal(sum_of_all(), before) == (outcome == "refused"), "counted by halves"
assert outcomes == {"refused", "computed"}, outcomes
with memory_left(0):
    try:
        worker.compute(job(1000, Work.FORWARD))
    except ResourceExhausted:
        pass
    else:
        raise SystemExit("there was memory enough")
before = sum_of_all()
visit(1001)
difference = (sum_of_all() - before - once).abs().max().item()
assert difference <= 1e-4 * once.abs().max().item(), f"goes on as before: {difference} of {once.abs().max()}"
"""


def test_what_does_not_fit_costs_one_microbatch() -> None:
    command = [sys.executable, "-P", "-c", PROGRAM]
    thresholds = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **thresholds}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
