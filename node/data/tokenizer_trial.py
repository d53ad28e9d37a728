"""Tries a stranger's tokenizer file in a process of its own, with limits: the library cannot be stopped in ours."""

import os
import subprocess
import sys
from functools import lru_cache
from typing import Final

CPU_S: Final = 15
WALL_S: Final = 300.0
MEMORY_BYTES: Final = 2 * 2**30
TIMES_THE_FILE: Final = 32  # Memory for each byte of the file, besides MEMORY_BYTES
PROBE_BYTES: Final = 2**17  # Time that grows with the square of a text's length is far beyond CPU_S here
PROBES: Final = (" ", "\n", "a", "1", "!", "\u00e9", "\u3042", "a ", " a1!\n")


@lru_cache(maxsize=4)
def fault_of(content: bytes) -> str | None:
    """Returns why a tokenizer file should not be opened here, or None. Blocks for a second; `content` is bounded."""
    command = (sys.executable, "-P", __file__, str(CPU_S))  # it imports none of our packages
    environment = {"PATH": os.defpath, "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(  # noqa: S603 - the command is our own, and no shell reads it
            command, input=content, capture_output=True, env=environment, timeout=WALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it takes more than {WALL_S:g} s to encode {PROBE_BYTES} bytes of text"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith("note:")][-1:]
    why = said[0][:200] if said else f"it needs more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB, or crashes its library"
    return f"it fails on {PROBE_BYTES} bytes of text: {why}"


def main() -> None:
    """Reads a tokenizer file from standard input and encodes PROBES. Fails by exit code or signal."""
    content = sys.stdin.buffer.read()
    try:
        import resource

        seconds = int(sys.argv[1])
        memory = MEMORY_BYTES + TIMES_THE_FILE * len(content)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    except (ImportError, ValueError):  # not this system's; the time limit of `fault_of` remains
        pass
    import tokenizers  # an optional dependency

    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    for probe in PROBES:
        text = probe * (PROBE_BYTES // len(probe.encode()))
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)


if __name__ == "__main__":
    main()
