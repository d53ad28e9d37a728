"""Delays and rates between twelve cloud regions, as measured.

Source: SkipPipe's own measurements between Google Cloud regions (gensyn-ai/skippipe, commit 7f20d8a,
schedulers/communication_costs.py). Delays are one way; both tables are symmetric. The source has 0.24 MiB/s between NL
and London, a hundredth of what lies between their neighbours; it is taken for a slip and multiplied by 100 here.
"""

from __future__ import annotations

from typing import Final

REGIONS: Final = (
    "australia",
    "belgium",
    "canada",
    "germany",
    "iowa",
    "japan",
    "la",
    "nl",
    "oregon",
    "singapore",
    "taiwan",
    "london",
)

_SAME_MS: Final = 1.0
_SAME_MIB_PER_S: Final = 2048.0

_LATENCY_MS: Final = (
    (),
    (129.0,),
    (98.0, 41.0),
    (125.5, 4.0, 44.0),
    (84.0, 49.0, 14.0, 53.5),
    (58.0, 112.0, 74.0, 112.0, 72.5),
    (69.0, 70.0, 35.0, 73.0, 23.4, 50.0),
    (128.0, 3.0, 42.0, 3.5, 51.0, 108.5, 71.5),
    (68.0, 66.0, 30.5, 68.0, 19.3, 46.2, 12.4, 67.0),
    (48.0, 83.0, 107.0, 80.0, 101.5, 35.6, 79.5, 81.5, 78.5),
    (67.0, 105.0, 89.0, 102.0, 88.0, 19.2, 64.0, 105.5, 59.5, 23.2),
    (132.0, 3.5, 38.5, 6.6, 48.1, 107.0, 68.0, 4.8, 64.0, 85.0, 109.5),
)
"""Row by row, each to the regions before it."""

_MIB_PER_S: Final = (
    (),
    (10.06,),
    (13.5, 20.38),
    (10.71, 248.32, 32.62),
    (11.5, 29.0, 77.5, 27.25),
    (14.12, 12.0, 18.5, 11.35, 14.31),
    (15.0, 19.88, 31.25, 18.69, 62.94, 28.44),
    (9.75, 248.32, 25.62, 248.32, 28.06, 11.65, 14.59),
    (15.0, 21.38, 48.25, 15.28, 92.5, 31.19, 121.38, 20.88),
    (30.5, 16.5, 12.22, 12.8, 12.94, 39.94, 17.25, 16.75, 17.19),
    (21.5, 12.75, 15.06, 12.88, 13.11, 78.56, 16.58, 12.25, 23.88, 63.38),
    (9.62, 248.32, 37.25, 193.28, 22.38, 9.1, 15.28, 24.0, 21.75, 16.06, 9.18),
)
"""Likewise."""


def one_way_s(one: str, other: str) -> float:
    """The one-way delay in seconds from one region to another. Both must be in `REGIONS`."""
    if one == other:
        return _SAME_MS / 1000
    return _cell(_LATENCY_MS, one, other) / 1000


def bytes_per_s(one: str, other: str) -> float:
    """The rate between a machine in one region and one in another."""
    return (_SAME_MIB_PER_S if one == other else _cell(_MIB_PER_S, one, other)) * 2**20


def _cell(table: tuple[tuple[float, ...], ...], one: str, other: str) -> float:
    first, last = sorted((REGIONS.index(one), REGIONS.index(other)))
    return table[last][first]
