"""Every codec of ours against every codec of hivemind: how small, how exact, how fast. One process, one thread, both to
bytes and back.

    python benchmarks/codecs.py [--quick] [--compiled] [--steps N] [--text FILE-OR-FOLDER] [--tensors FILE]

The tensors are those that training makes (`benchmarks.codec_capture`), normal numbers, and hidden states two of whose
channels stand out. An error is
|decoded - values| / |values| (L2) over all tensors of a class, a ratio their bytes over the encodings'. Times are taken
in turns (`benchmarks.codecs_timing`), with the allocator set as in a node (`node.runtime.malloc`). `encode` ends where
the library hands over to its transport (ours: the encoding's memory; hivemind's: a protobuf message), `encode_to_bytes`
with a byte string of its own; `decode` begins with what the library's own transport gives (ours: writable memory),
`decode_from_bytes` with a byte string, which ours has to copy. Ours writes into memory that is there, hivemind's makes
a tensor.

Prints one JSON object; progress goes to stderr. `targets` says what was to be reached and what was; they are for a
machine that does nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor

from benchmarks.codec_capture import OUTLIERS, Captured, Task, captured, described
from benchmarks.codecs_contenders import (
    WORKAROUND,
    Contender,
    Ours,
    Sent,
    attempt,
    contenders,
    their_decoding_as_it_is,
    with_workaround,
)
from benchmarks.codecs_targets import targets
from benchmarks.codecs_timing import measured
from node.runtime.malloc import keep_freed_memory
from swarm.vocabulary.types import Codec

TIMED: Final = ("activations", "pseudo_gradient", "outliers", "bf16_parameters")
MAGNITUDES: Final = tuple(10.0**exponent for exponent in range(-7, 4))
SWEPT_ELEMENTS: Final = 2**18


def accuracy(contender: Contender, tensors: Sequence[Tensor], channels: Tensor | None = None) -> dict[str, Any]:
    """Ratio and error over the tensors; with `channels`, also the error on these alone. Raises what the contender
    raises."""
    sent_bytes, wrong, whole = 0, torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    names: set[str] = set()
    for values in tensors:
        sent = contender.serialize(contender.encode(values))
        sent_bytes += len(sent.data)
        names |= sent_as(contender, sent)
        exact = values.double()
        off = contender.decode(sent, torch.empty_like(values)).double() - exact
        chosen = slice(None) if channels is None else channels
        wrong += torch.stack([off.square().sum(), off[..., chosen].square().sum()])
        whole += torch.stack([exact.square().sum(), exact[..., chosen].square().sum()])
    error = (wrong / whole).sqrt().tolist()
    found: dict[str, Any] = {
        "ratio": round(sum(each.nbytes for each in tensors) / sent_bytes, 3),
        "error": rounded(error[0]),
    }
    if channels is not None:
        found["error_on_normal_channels"] = rounded(error[1])
    return found | ({"sent_as": sorted(names)} if names else {})


def sent_as(contender: Contender, sent: Sent) -> set[str]:
    """The codec that was used instead of the one asked for, if any."""
    if isinstance(contender, Ours) and sent.spec is not None and sent.spec.codec is not contender.codec:
        return {sent.spec.codec.name}
    return set()


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def accuracies(contender: Contender, found: Captured) -> dict[str, Any]:
    """By class, or what went wrong."""
    channels = found.classes["outliers"][0].shape[-1]
    normal = torch.tensor([channel for channel in range(channels) if channel not in OUTLIERS])
    return {
        name: attempt(lambda: accuracy(contender, tensors, normal if name == "outliers" else None))  # noqa: B023
        for name, tensors in found.classes.items()
    }


def by_magnitude(contender: Contender) -> dict[str, Any]:
    """Error on normal numbers of each root mean square."""
    numbers = torch.randn(SWEPT_ELEMENTS // 256, 256, generator=torch.Generator().manual_seed(2))
    return {f"{size:.0e}": attempt(lambda: accuracy(contender, [numbers * size])["error"]) for size in MAGNITUDES}  # noqa: B023


def with_what_is_not_finite(contender: Contender) -> dict[str, Any]:
    """What becomes of a NaN or an infinity among 64 thousand normal numbers: of it and of the others."""
    found: dict[str, Any] = {}
    for bad in (float("nan"), float("inf")):
        values = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
        values[100, 100] = bad
        found[str(bad)] = attempt(lambda: _with_one(contender, values))  # noqa: B023
    return found


def _with_one(contender: Contender, values: Tensor) -> dict[str, Any]:
    sent = contender.serialize(contender.encode(values))
    decoded = contender.decode(sent, torch.empty_like(values))
    others = torch.ones_like(values, dtype=torch.bool)
    others[100, 100] = False
    error = ((decoded[others] - values[others]).norm() / values[others].norm()).item()
    result: dict[str, Any] = {"decoded": str(decoded[100, 100].item()), "error_of_the_others": str(rounded(error))}
    return result | ({"sent_as": sorted(names)} if (names := sent_as(contender, sent)) else {})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    task = Task(options.steps) if options.text is None else Task(options.steps, f"path:{options.text}")
    found = captured(task, options.tensors)
    as_it_is = their_decoding_as_it_is()
    load = os.getloadavg()[0]
    with with_workaround():
        everybody = contenders()
        rows = {contender.name: figures_of(contender, found) for contender in everybody}
        for name in TIMED:
            tensors = found.classes[name]
            speeds = measured(everybody, name, tensors[len(tensors) // 2], options.repeats)
            for contender, figures in speeds.items():
                rows[contender]["speed"][name] = figures
    return {
        "machine": machine() | {"load_before_and_after": [load, os.getloadavg()[0]]},
        "captured": described(task, found),
        "repeats": options.repeats,
        "contenders": rows,
        "hivemind_8_bit_as_it_is": {"decoding": as_it_is, "measured_with": WORKAROUND},
        "cuda": on_device(found, options.repeats),
        **({"compiled": compiled(found, options.repeats)} if options.compiled else {}),
        "targets": targets(rows, as_it_is),
    }


def figures_of(contender: Contender, found: Captured) -> dict[str, Any]:
    """All but the speed."""
    print(f"accuracy of {contender.name}", file=sys.stderr)
    return {
        "classes": accuracies(contender, found),
        "error_by_rms": by_magnitude(contender),
        "not_finite": with_what_is_not_finite(contender),
        "speed": {},
    }


def on_device(found: Captured, repeats: int) -> dict[str, Any] | str:
    """Ours with the tensors on a GPU: encoded there, the encoding copied; hivemind's take none from there."""
    if not torch.cuda.is_available():
        return "not available"
    ours = [contender for contender in contenders() if isinstance(contender, Ours)]
    return {name: measured(ours, f"cuda, {name}", found.classes[name][0].cuda(), repeats) for name in TIMED}


def compiled(found: Captured, repeats: int) -> dict[str, Any] | str:
    """What torch.compile would bring; the product does not use it."""
    from benchmarks.codecs_compiled import compiled_contenders, compiler

    if compiler() is None:
        print("no C++ compiler: torch.compile is not measured", file=sys.stderr)
        return "no C++ compiler"
    values = found.classes["activations"][0]
    both = [*compiled_contenders(), Ours(Codec.INT8), Ours(Codec.INT4)]
    speeds = measured(both, "compiled", values, repeats)
    return {each.name: {**speeds[each.name], **attempt(lambda: accuracy(each, [values]))} for each in both}  # noqa: B023


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "hivemind": version("hivemind"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short training, few repeats: to see that it works")
    parser.add_argument("--repeats", type=int, help="turns (default 7)")
    parser.add_argument("--steps", type=int, help="inner steps before anything is captured (default 200)")
    parser.add_argument("--text", type=Path, help="read this instead of the standard library's source")
    parser.add_argument(
        "--tensors", type=Path, help="safetensors file: read the captured tensors from it, or write them to it"
    )
    parser.add_argument("--compiled", action="store_true", help="also measure torch.compile")
    options = parser.parse_args()
    options.steps = options.steps or (20 if options.quick else 200)
    options.repeats = options.repeats or (3 if options.quick else 7)
    keep_freed_memory()
    torch.set_num_threads(1)
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
