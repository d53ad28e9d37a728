"""A chaos scenario: one of `node.lab.wan.scenario` with more actions, and what has to hold. docs/CHAOS.md shows one."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.lab.chaos.fault_parsing import CHAOS_ACTIONS
from node.lab.wan.scenario import LONGEST_S, MAX_BYTES, Scenario, merged, scenario_from_table
from node.lab.wan.toml_table import Table
from swarm.vocabulary.errors import ConfigError

FOLDER: Final = Path(__file__).parent / "scenarios"
ALL: Final = "all"

SMALL_RUN: Final[Mapping[str, Any]] = {
    "model": {"hidden": 32, "heads": 4, "kv_heads": 2, "feed_forward": 64, "sequence": 32},
    "stages": {"blocks": [0, 1, 1]},
    "training": {
        "rows": 2,
        "inner_tokens": 256,
        "inner_steps": 4,
        "staleness": 1,
        "schedule": {"kind": "constant", "warmup_steps": 5, "total_steps": 1_000_000},
    },
}
"""What a scenario's manifest is unless it says otherwise: faults show as well in a small model, which leaves the
machine time for them."""
USUAL_GROUP: Final = {"name": "peers", "peers": 5, "profile": "none", "latency_ms": 20}
"""Links that are long enough to bound the pace: otherwise it would be the machine's, and suffer from every process that
starts."""
USUAL_RECOVERY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Expectations:
    """What has to hold besides the rules of `skipstone check`."""

    recovery_s: float
    """The longest recovery."""
    at_least: Mapping[str, int]
    """Counts of the check's report (docs/CHAOS.md has those that chaos adds)."""
    at_most: Mapping[str, int]
    loss_ratio: float | None = None
    """The most that the held-out loss may be, over that of the undisturbed run at as many tokens; None where they are
    not compared."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A scenario as read."""

    name: str
    fault: str
    """In a few words, for the table."""
    scenario: Scenario
    text: str
    save_every_s: float | None
    """None where no checkpoints are kept."""
    expected: Expectations


def known_plans() -> dict[str, Path]:
    """The scenarios that come along, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find_plans(names: list[str]) -> list[Path]:
    """The files meant by names, paths, and `all`, each once. Raises ConfigError for what is none of them."""
    known = known_plans()
    found: list[Path] = []
    for name in names:
        if name == ALL:
            found += known.values()
        elif name in known:
            found.append(known[name])
        elif Path(name).is_file():
            found.append(Path(name))
        else:
            raise ConfigError(
                f"{name!r} is neither a scenario nor a file", hint="`skipstone chaos --list` shows the scenarios."
            )
    return list(dict.fromkeys(found))


def read_plan(path: Path) -> ChaosPlan:
    """Checks every key.

    Raises:
        ConfigError: it cannot be read, or a key is wrong.
        ManifestError: likewise a key under `manifest`.
    """
    try:
        raw = path.read_bytes()
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"the scenario {path} has more than {MAX_BYTES} bytes")
        text = raw.decode()
        return plan_from_table(tomllib.loads(text), text)
    except OSError as error:
        raise ConfigError(f"the scenario {path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the scenario {path} is not TOML: {error}") from None


def plan_from_table(values: dict[str, Any], text: str) -> ChaosPlan:
    """As `read_plan`."""
    own = values.pop("chaos", None)
    if not isinstance(own, dict):
        raise ConfigError("chaos must be a table: write [chaos] with at least `fault`")
    table = Table(own, "chaos")
    fault = table.text("fault")
    save_every_s = table.number("save_every", 0.1, LONGEST_S, 0.0)
    expected = Expectations(
        table.number("recovery", 1.0, LONGEST_S, USUAL_RECOVERY_S),
        _counts(table, "at_least"),
        _counts(table, "at_most"),
        table.number("loss_ratio", 1.0, 10.0, 0.0) or None,
    )
    table.finish()
    values.setdefault("group", [dict(USUAL_GROUP)])
    values.setdefault("held_out", 0)
    values["manifest"] = merged(dict(SMALL_RUN), values.get("manifest", {}))
    scenario = scenario_from_table(values, CHAOS_ACTIONS)
    if (expected.loss_ratio is None) != (scenario.held_out == 0):
        raise ConfigError(
            "chaos.loss_ratio and held_out go together: one says of how many microbatches, the other how large"
        )
    return ChaosPlan(scenario.name, fault, scenario, text, save_every_s or None, expected)


def _counts(table: Table, key: str) -> dict[str, int]:
    counts = Table(table.table(key), table.path(key))
    return {name: int(counts.number(name, 0, 2**53, whole=True)) for name in table.table(key)}
