"""Every kind of job on a device that is not the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

pytestmark = [
    pytest.mark.timeout(300),  # ten seconds of computing, which a busy machine makes minutes
    pytest.mark.xdist_group("pretend device"),  # and once is enough
]

ROOT: Final = Path(__file__).parent.parent.parent.parent
ALLOWED: Final = {
    "FORWARD": 1,
    "BACKWARD": 1,
    "BACKWARD recomputed": 1,
    "EVALUATE": 1,
    "REPLAY": 1,
    "retract": 0,
    "step": 1,
    "embed": 2,
    "loss": 4,
    "finish": 2,
    "evaluate loss": 3,
    "step of stage 0": 1,
}
CODECS: Final = ("NONE", "BF16", "INT8", "INT4")
FARTHEST: Final = {"float32": 1e-3, "bfloat16": 0.03}
STEP_OF_8_BITS: Final = 0.016
STEPS: Final = {"INT4": 0.15}
MOST_BYTES: Final = {
    "float32": {"resident": 16.1, "forward": 16.2, "backward": 16.4, "step": 16.6, "recomputed backward": 16.4},
    "8bit": {"resident": 10.2, "forward": 10.2, "backward": 10.5, "step": 11.0, "recomputed backward": 10.5},
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "tests.node.device.every_job"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_results_are_those_of_the_cpu(found: dict[str, Any], dtype: str) -> None:
    differences = found[dtype]["differences"]
    assert len(differences) > 50

    def is_near(name: str, off: float) -> bool:
        last = name.split()[-1]
        return off <= max(FARTHEST[dtype], STEP_OF_8_BITS if last == "8bit" else STEPS.get(last, 0.0))

    assert {name: off for name, off in differences.items() if not is_near(name, off)} == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("job", ALLOWED)
@pytest.mark.parametrize("codec", CODECS)
def test_no_job_waits_for_the_device_without_need(found: dict[str, Any], dtype: str, job: str, codec: str) -> None:
    waits = found[dtype]["waits"][f"{job} {codec}"]
    assert sum(waits.values()) == ALLOWED[job], waits


@pytest.mark.parametrize(("form", "moment"), [(form, moment) for form, most in MOST_BYTES.items() for moment in most])
def test_a_parameter_takes_no_more_memory_than_this(found: dict[str, Any], form: str, moment: str) -> None:
    assert MOST_BYTES[form][moment] - 0.5 < found["bytes"][form][moment] <= MOST_BYTES[form][moment]


def test_a_kept_visit_takes_its_blocks_inputs_and_graphs_and_a_dropped_one_nothing(found: dict[str, Any]) -> None:
    graph = found["graph"]
    assert graph["0"] <= 2.2, "the inputs alone, in bfloat16"
    for more in range(1, 5):
        assert 8 < graph[str(more)] - graph[str(more - 1)] < 16, "a quarter of a whole graph's each"
    assert found["dropped"] == 0


def test_what_is_no_encoding_is_refused_with_the_output() -> None:
    code = """
import struct
from dataclasses import replace
from protocol.interfaces.tensor_spec import TensorSpec
from swarm.pipeline.custody import Work
from swarm.vocabulary.errors import ProtocolViolation
from swarm.vocabulary.types import Codec
from tests.node.device.every_job import HAS_OUTLIER, Hop
from tests.node.device.pretend import DEVICE, pretended
from tests.node.small_manifest import small_manifest
with pretended():
    hop = Hop(small_manifest(), DEVICE, Codec.INT8)
    job = hop.job(Work.FORWARD, HAS_OUTLIER)
    spec = job.input.spec
    base = replace(spec, outliers=0).byte_length
    assert spec.outliers == 1
    for place, wrong in ((base - 4, struct.pack("<f", -1.0)), (base, b"\\xff\\xff"), (base, b"\\x40\\x00")):
        right = bytes(job.input.data[place : place + len(wrong)])
        job.input.data[place : place + len(wrong)] = wrong
        try:
            hop.worker.compute(job)
        except ProtocolViolation as error:
            assert "malformed" in str(error)
        else:
            raise SystemExit(f"taken: {wrong}")
        job.input.data[place : place + len(wrong)] = right
    hop.worker.compute(job)
"""
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ})
    assert ran.returncode == 0, ran.stdout + ran.stderr
