"""Decodes whatever a fuzzer makes up, for as long as it is told to: no crash, no error but ProtocolViolation, no memory
beyond a bound.

    python tests/fuzz/codecs.py [--seconds 60] [--corpus FOLDER]

With atheris installed (`pip install atheris`) the fuzzer is guided by what of protocol/codecs has been reached;
without, bytes are random. A failure ends it with a traceback. While it decodes, the process may not take more than
ROOM_BYTES of address space besides what it has: what a decoder would need for 2^16 elements many times over, and far
less than lengths that it should not have trusted.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

try:
    import atheris
except ImportError:
    atheris = None

with (
    atheris.instrument_imports(include=["protocol.codecs", "protocol.interfaces.tensor_spec"])
    if atheris
    else nullcontext()
):
    import torch

    from tests.fuzz.decoding import check, received

ROOM_BYTES: Final = 16 * 2**20
LONGEST_INPUT: Final = 4096


def decode_made_up(made_up: bytes) -> None:
    case = received(made_up)
    if case is not None:
        with limited_memory():
            check(case)


@contextmanager
def limited_memory() -> Iterator[None]:
    """An allocation beyond the bound fails, and torch's error about it ends the run."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def random_inputs(seconds: float) -> None:
    generator, until, count = Random(1), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        decode_made_up(generator.randbytes(generator.randrange(LONGEST_INPUT)))
        count += 1
    print(f"no atheris: {count} random inputs, nothing found", file=sys.stderr)


def guided(seconds: float, corpus: list[str]) -> Any:
    """Does not return: libFuzzer ends the process."""
    options = [
        f"-max_total_time={int(seconds)}",
        f"-max_len={LONGEST_INPUT}",
        f"-artifact_prefix={tempfile.gettempdir()}/",
        "-rss_limit_mb=0",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], *options, *corpus], decode_made_up)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--corpus", type=Path, help="folder of inputs to begin with; interesting ones are added (atheris only)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if atheris is None:
        random_inputs(options.seconds)
    else:
        guided(options.seconds, [str(options.corpus)] if options.corpus else [])


if __name__ == "__main__":
    main()
