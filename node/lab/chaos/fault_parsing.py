"""How a scenario's events are read that only chaos knows. Together with those of `node.lab.wan.scenario`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from node.lab.chaos.faults import (
    DHT_CHILD,
    P2P_DAEMON,
    Child,
    Crash,
    FreezeConvener,
    FullDisk,
    Lie,
    Odd,
    OneWay,
    Resets,
    Restart,
    Worsen,
)
from node.lab.wan.scenario import ACTIONS, LONGEST_S, Cast, ReadAction
from node.lab.wan.scenario_events import Happening
from node.lab.wan.toml_table import Table
from node.observability.failpoints import POINTS
from swarm.vocabulary.errors import ConfigError

CHILDREN: Final = {"dht": DHT_CHILD, "p2pd": P2P_DAEMON}
MAX_CLOCK_S: Final = 10 * 365 * 24 * 3600.0


def _for(table: Table) -> float:
    return table.number("for", 0.1, LONGEST_S)


def _worsen(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    return (Worsen(at_s, cast.read_peers(table), table.shape_change(), _for(table)),)


def _one_way(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    return (OneWay(at_s, cast.read_peers(table, "from"), cast.read_peers(table, "to"), _for(table)),)


def _resets(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    every = int(table.number("every_bytes", 1, 2**40, whole=True))
    return (Resets(at_s, cast.read_peers(table), every, _for(table)),)


def _child(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    which = _one_of(table, "which", CHILDREN)
    return (Child(at_s, cast.read_peers(table), CHILDREN[which], table.number("for", 0.1, LONGEST_S, 0.0)),)


def _crash(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    return (
        Crash(
            at_s,
            cast.read_stage(table),
            _one_of(table, "point", POINTS),
            int(table.number("nth", 1, 10**9, 1, whole=True)),
            table.flag("again"),
            table.number("leave_after", 0.1, LONGEST_S, 0.0),
            cast.groups[0].site,
        ),
    )


def _restart(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    politely = table.flag("politely")
    return (Restart(at_s, cast.read_peers(table), politely, table.number("gap", 0.0, LONGEST_S, 0.0)),)


def _odd(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    oddities: list[str] = []
    ahead_s = table.number("clock", -MAX_CLOCK_S, MAX_CLOCK_S, 0.0)
    if ahead_s:
        oddities.append(f"--clock={ahead_s:g}")
    step_s, step_after_s = table.number("step", -MAX_CLOCK_S, MAX_CLOCK_S, 0.0), 0.0
    if step_s:
        oddities.append(f"--step={step_s:g}")
        step_after_s = table.number("step_after", 1.0, LONGEST_S)
    versions = table.text_or_none("protocol")
    if versions is not None:
        if not all(part.isdecimal() for part in versions.split("-")) or versions.count("-") != 1:
            raise ConfigError(f"{table.path('protocol')} must be versions like `1-2`, not {versions!r}")
        oddities.append(f"--protocol={versions}")
    if not oddities:
        missing = " and ".join(table.path(key) for key in ("clock", "step", "protocol"))
        raise ConfigError(f"{missing} are missing: there is nothing odd")
    stage, works, site = cast.read_stage(table), table.flag("works"), cast.groups[0].site
    return (Odd(at_s, stage, tuple(oddities), works, site, step_after_s, starts_right=not ahead_s),)


def _lie(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    seed = int(table.number("seed", 0, 2**31, 0, whole=True))
    return (Lie(at_s, cast.read_stage(table), seed, cast.groups[0].site),)


def _freeze_convener(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    return (FreezeConvener(at_s, cast.read_stage(table), _for(table)),)


def _one_of(table: Table, key: str, known: Mapping[str, str]) -> str:
    text = table.text(key)
    if text not in known:
        raise ConfigError(f"{table.path(key)}: {text!r} is none of {', '.join(known)}")
    return text


CHAOS_ACTIONS: Final[Mapping[str, ReadAction]] = {
    **ACTIONS,
    "worsen": _worsen,
    "one_way": _one_way,
    "resets": _resets,
    "child": _child,
    "full_disk": lambda table, at_s, cast: (FullDisk(at_s, cast.read_peers(table), _for(table)),),
    "crash": _crash,
    "restart": _restart,
    "odd": _odd,
    "lie": _lie,
    "freeze_convener": _freeze_convener,
}
