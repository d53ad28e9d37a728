"""Freed memory stays with the process: counted in page faults, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
