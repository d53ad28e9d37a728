"""What `benchmarks.codecs` is to show, each with what it has shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

Rows = dict[str, dict[str, Any]]
"""What was measured of each contender, by its name."""

ERROR_CLASSES: Final = ("activations", "activation_gradients", "pseudo_gradient", "normal")
"""What is sent through lossy codecs, and normal numbers. (Adam's second moment, which no run sends so, is squares: INT8
and INT4 are a little worse there.)"""
SPEED_CLASSES: Final = ("activations", "pseudo_gradient")
LINK_GBPS: Final = 0.125
"""1 Gbit/s, in bytes."""
UNCHANGED: Final = 1.02
"""A relative error's largest over its smallest."""


def targets(rows: Rows, their_decoding: dict[str, str]) -> list[dict[str, Any]]:
    """Each with `measured` and `met`. A speed is the lower median of two classes, an error the largest, a ratio the
    smallest."""
    return [
        *eight_bits(rows),
        *sixteen_bits(rows),
        *four_bits(rows),
        *lossless(rows),
        *any_size(rows),
        *any_numpy(rows, their_decoding),
    ]


def eight_bits(rows: Rows) -> list[dict[str, Any]]:
    ours, apart = rows["skipstone.INT8"], rows["skipstone.INT8"]["classes"]["outliers"]
    uniform = rows["hivemind.UNIFORM_8BIT"]
    return [
        at_least("8 bits: ratio", 3.85, smallest(ours, "ratio")),
        at_most("8 bits: error on all classes", 7e-3, largest(ours, "error")),
        fast("8 bits: encode, GB/s", 3.5, ours, "encode"),
        fast("8 bits: decode, GB/s", 6.0, ours, "decode"),
        at_least("8 bits: encode to bytes over hivemind's Uniform8", 4.0, times_as_fast(ours, uniform)),
        at_most("8 bits, two outlier channels: error on the others", 1e-2, number(apart, "error_on_normal_channels")),
        at_most("8 bits, two outlier channels: error", 5e-3, number(apart, "error")),
    ]


def sixteen_bits(rows: Rows) -> list[dict[str, Any]]:
    ours = rows["skipstone.BF16"]
    return [
        fast("bf16: encode, GB/s", 8.0, ours, "encode"),
        fast("bf16: decode, GB/s", 8.0, ours, "decode"),
    ]


def four_bits(rows: Rows) -> list[dict[str, Any]]:
    ours = rows["skipstone.INT4"]
    return [
        at_least("4 bits: ratio", 7.1, smallest(ours, "ratio")),
        at_most("4 bits: error on all classes", 0.105, largest(ours, "error")),
        fast("4 bits: encode, GB/s", 1.8, ours, "encode"),
        fast("4 bits: decode, GB/s", 3.5, ours, "decode"),
    ]


def lossless(rows: Rows) -> list[dict[str, Any]]:
    ours = rows["skipstone.PLANES"]
    whole, half = ours["classes"]["parameters"], ours["classes"]["bf16_parameters"]
    errors = [number(of_class, "error") for of_class in ours["classes"].values()]
    return [
        at_least("lossless: ratio on float32 parameters", 1.18, number(whole, "ratio")),
        at_least("lossless: ratio on bf16 parameters", 1.45, number(half, "ratio")),
        at_most(
            "lossless: error on all classes",
            0.0,
            None if None in errors else max(each for each in errors if each is not None),
        ),
        at_least(
            "lossless: encode, GB/s (a 1 Gbit/s link)",
            LINK_GBPS,
            speed(ours, "encode", (*SPEED_CLASSES, "bf16_parameters")),
        ),
        at_least(
            "lossless: decode, GB/s (a 1 Gbit/s link)",
            LINK_GBPS,
            speed(ours, "decode", (*SPEED_CLASSES, "bf16_parameters")),
        ),
    ]


def any_size(rows: Rows) -> list[dict[str, Any]]:
    """Errors for a root mean square from 1e-7 to 1e+3."""
    return [
        at_most(
            f"{name}: largest over smallest error, rms from 1e-7 to 1e+3", UNCHANGED, spread(rows[f"skipstone.{name}"])
        )
        for name in ("BF16", "INT8", "INT4")
    ]


def any_numpy(rows: Rows, their_decoding: dict[str, str]) -> list[dict[str, Any]]:
    """hivemind's codecs fail with some; ours have been decoded with this one when they have errors at all."""
    ours = [name for name, row in rows.items() if name.startswith("skipstone.")]
    broken = [name for name in ours if all(isinstance(of_class, str) for of_class in rows[name]["classes"].values())]
    measured = {"ours that fail": broken, "hivemind's": their_decoding}
    return [{"target": "works with the NumPy that is installed", "measured": measured, "met": not broken}]


def at_least(target: str, bound: float, measured: float | None) -> dict[str, Any]:
    return {
        "target": target,
        "at_least": bound,
        "measured": measured,
        "met": measured is not None and measured >= bound,
    }


def fast(
    target: str, bound: float, row: dict[str, Any], operation: str, classes: Iterable[str] = SPEED_CLASSES
) -> dict[str, Any]:
    """By the clock; for a machine that has other things to do, also the fastest and by the time of the processor."""
    found = at_least(target, bound, speed(row, operation, classes))
    return found | {kind: speed(row, f"{operation}_{kind}", classes) for kind in ("best", "cpu")}


def at_most(target: str, bound: float, measured: float | None) -> dict[str, Any]:
    return {"target": target, "at_most": bound, "measured": measured, "met": measured is not None and measured <= bound}


def smallest(row: dict[str, Any], key: str) -> float | None:
    return _of_all(min, (number(row["classes"][name], key) for name in ERROR_CLASSES))


def largest(row: dict[str, Any], key: str) -> float | None:
    return _of_all(max, (number(row["classes"][name], key) for name in ERROR_CLASSES))


def speed(row: dict[str, Any], operation: str, classes: Iterable[str] = SPEED_CLASSES) -> float | None:
    return _of_all(min, (number(row["speed"][name], f"{operation}_gbps") for name in classes))


def times_as_fast(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    """In encoding to bytes; the least of two classes."""
    speeds = [
        (speed(row, "encode_to_bytes", [name]), speed(other, "encode_to_bytes", [name])) for name in SPEED_CLASSES
    ]
    return _of_all(min, (quotient(*pair) for pair in speeds))


def spread(row: dict[str, Any]) -> float | None:
    errors = [error if isinstance(error, float) else None for error in row["error_by_rms"].values()]
    return quotient(_of_all(max, errors), _of_all(min, errors))


def quotient(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None or right == 0 else round(left / right, 4)


def number(found: Any, key: str) -> float | None:
    """None for what could not be measured."""
    return found.get(key) if isinstance(found, dict) else None


def _of_all(choose: Any, values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else choose(known)
