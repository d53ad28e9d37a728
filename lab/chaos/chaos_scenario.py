"""Chaos scenarios: those of `lab.experiment.scenario` with more that can happen, and what has to hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from lab.chaos.faults import FAULTS
from lab.chaos.recovery import SHARE
from lab.experiment.scenario import Group, Scenario
from lab.experiment.scenario_events import ScenarioEvent
from lab.experiment.scenario_table import LONGEST_S, ScenarioTable, Span, Text
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
USUAL_GROUP: Final = Group(name="peers", peers=5, profile="none", latency_ms=20)
"""Links that are long enough to bound the pace: otherwise it would be the machine's, and suffer from every process that
starts."""

Counts = dict[str, Annotated[int, Field(ge=0, le=2**53)]]


class Expectations(ScenarioTable):
    """The expectations of a scenario: what is broken, and what has to hold besides the rules of `skipstone check`."""

    fault: Text
    """In a few words, for the table."""
    recovery_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 30.0
    """The longest recovery."""
    pace_share: Annotated[float, Field(gt=0, le=1)] = SHARE
    """Of the pace before the first fault that has to be back."""
    pace_within_s: Span | None = None
    """The longest until it is, also while a module is not served; None for as long as the recovery may take."""
    rerouted_for_s: Span | None = None
    """The longest that documents of a run with experts go to others after all modules are served again."""
    save_every_s: Span | None = None
    """None where no checkpoints are kept."""
    at_least: Counts = Field(default_factory=dict)
    """Counts of the check's report (docs/CHAOS.md has those that chaos adds)."""
    at_most: Counts = Field(default_factory=dict)
    loss_ratio: Annotated[float, Field(ge=1, le=10)] | None = None
    """The most that the held-out loss may be, over that of the undisturbed run at as many tokens; None where they are
    not compared."""


class ChaosScenario(Scenario):
    """A chaos scenario as read from its file."""

    KINDS: ClassVar[Mapping[str, type[ScenarioEvent]]] = {**Scenario.KINDS, **{kind.NAME: kind for kind in FAULTS}}
    BASE: ClassVar[Mapping[str, Any]] = SMALL_RUN

    held_out: Annotated[int, Field(ge=0, le=256)] = 0
    groups: Annotated[tuple[Group, ...], Field(alias="group", strict=False)] = (USUAL_GROUP,)
    chaos: Expectations

    @model_validator(mode="after")
    def _losses_are_compared_where_they_are_measured(self) -> Self:
        if (self.chaos.loss_ratio is None) != (self.held_out == 0):
            raise ValueError(
                "chaos.loss_ratio and held_out go together: one says of how many microbatches, the other how large"
            )
        return self


def known_scenarios() -> dict[str, Path]:
    """The scenarios that come along, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def find_scenarios(names: list[str]) -> list[Path]:
    """The files meant by names, paths, and `all`, each once. Raises ConfigError for what is none of them."""
    known = known_scenarios()
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
