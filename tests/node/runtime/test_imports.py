"""What a node costs its machine: nothing is imported in vain, and freed memory stays with the process."""

import json
import subprocess
import sys

import pytest

UNWANTED = (
    *("hivemind", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers", "datasets"),
    *("aiohttp", "huggingface_hub", "matplotlib", "prometheus_client", "pyarrow", "rich", "tokenizers"),
)
STEP = f"""
import json, sys, torch
import node.runtime.node
from node.model.optimizers.adamw import AdamW
from node.model.passes import backward, forward
from protocol.manifest.manifest import InnerSection

part = torch.nn.Linear(3, 3)
gradients = backward(part, forward(part, torch.ones(2, 3)), torch.ones(2, 3))
for parameter, gradient in zip(part.parameters(), gradients.parameters):
    parameter.grad = gradient
AdamW(part.parameters(), InnerSection()).step(0.1)
print(json.dumps([name for name in {UNWANTED} if name in sys.modules]))
"""


def test_a_step_imports_no_compiler_and_no_library_of_other_roles() -> None:
    ran = subprocess.run([sys.executable, "-c", STEP], check=True, capture_output=True, text=True)
    assert json.loads(ran.stdout) == []


CHUNKS = 100
PAGES_OF_A_CHUNK = 128

PROGRAM = f"""
import resource
from node.runtime.malloc import keep_freed_memory
if not keep_freed_memory():
    raise SystemExit("unsupported")
data = memoryview(bytearray(512 * 1024))
def make():
    return [b"".join((b"prefix", data)) for _ in range(4)]
make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({CHUNKS} // 4):
    make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_chunks_do_not_fault_their_pages_in_again() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    if "unsupported" in done.stderr:
        pytest.skip("the C library has no mallopt")
    assert int(done.stdout) < CHUNKS * PAGES_OF_A_CHUNK / 10
