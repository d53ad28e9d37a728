"""The scenario of an experiment: the swarm, its links, what happens when, and what is expected of it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import Field, InstanceOf, model_validator

from lab.emulation.link_shape import Site, profile_of
from lab.scenario_event import (
    EVENTS,
    LONGEST_S,
    MAX_REPLACEMENTS,
    Churn,
    LinkTable,
    ProfileName,
    ScenarioEvent,
    ScenarioTable,
    Span,
    Start,
    Text,
    read_table,
)
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import ConfigError

FOLDER: Final = Path(__file__).parent / "scenarios"
ALL: Final = "all"
MAX_PEERS: Final = 256
PACE_SHARE: Final = 0.5

# Faults show as well in a small model, which leaves the machine time for them. The links are long enough to bound the
# pace: else the machine would, and every process that starts would show.
CHAOS_DEFAULTS: Final[Mapping[str, Any]] = {
    "held_out": 0,
    "group": ({"name": "peers", "peers": 5, "profile": "none", "latency_ms": 20},),
    "manifest": {
        "model": {"hidden": 32, "heads": 4, "kv_heads": 2, "feed_forward": 64, "sequence": 32},
        "stages": {"blocks": [0, 1, 1]},
        "training": {
            "rows": 2,
            "inner_tokens": 256,
            "inner_steps": 4,
            "staleness": 1,
            "schedule": {"kind": "constant", "warmup_steps": 5, "total_steps": 1_000_000},
        },
    },
}
"""Defaults of a scenario with expectations."""

Counts = dict[str, Annotated[int, Field(ge=0, le=2**53)]]


class Group(LinkTable):
    """A group of peers with the same link: a profile's, and the changes to it."""

    name: Text
    peers: Annotated[int, Field(ge=1, le=MAX_PEERS)]
    profile: ProfileName

    @cached_property
    def site(self) -> Site:
        return self.applied_to(profile_of(self.profile).site)


class Expectations(ScenarioTable):
    """What is broken, and what must hold besides the rules of `skipstone check`."""

    fault: Text
    recovery_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 30.0
    pace_share: Annotated[float, Field(gt=0, le=1)] = PACE_SHARE
    """Share of the pace before the first fault that must be back."""
    pace_within_s: Span | None = None
    """Longest time until the pace is back, even without a replica of some module; None: as the recovery."""
    rerouted_for_s: Span | None = None
    """Longest time that documents visit other experts after all modules are served again."""
    save_every_s: Span | None = None
    at_least: Counts = Field(default_factory=dict)
    at_most: Counts = Field(default_factory=dict)
    loss_ratio: Annotated[float, Field(ge=1, le=10)] | None = None
    """Largest held-out loss over the undisturbed run's at equal tokens; None: not compared."""


class Scenario(ScenarioTable):
    """A scenario as read; times count from the moment when the run begins."""

    name: Text
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    duration_s: Annotated[float, Field(ge=1, le=LONGEST_S)]
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    held_out: Annotated[int, Field(ge=0, le=256)] = 16
    """Held-out microbatches measured at the end; 0 for none."""
    route_from: Text | None = None
    """Text that fits the router of a run with experts, as in `data.source`; None: random routes."""
    groups: Annotated[tuple[Group, ...], Field(alias="group", strict=False)] = ()
    changes: dict[str, Any] = Field(default_factory=dict, alias="manifest")
    """Changes to the demo run's manifest."""
    events: Annotated[tuple[InstanceOf[ScenarioEvent], ...], Field(alias="event")] = ()
    chaos: Expectations | None = None
    """What the run is judged by, besides the check of its logs."""

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, table: Any) -> Any:
        if not isinstance(table, dict) or "chaos" not in table:
            return table
        own = table.get("manifest", {})
        manifest = _merged(CHAOS_DEFAULTS["manifest"], own) if isinstance(own, dict) else own
        return {**CHAOS_DEFAULTS, **table, "manifest": manifest}

    @model_validator(mode="after")
    def _losses_are_compared_where_they_are_measured(self) -> Self:
        if self.chaos is not None and (self.chaos.loss_ratio is None) != (self.held_out == 0):
            raise ValueError(
                "chaos.loss_ratio and held_out go together: one says of how many microbatches, the other how large"
            )
        return self

    @property
    def manifest(self) -> Manifest:
        """The demo run's manifest with our changes. Raises ManifestError, or ConfigError without a router."""
        return self._routed[0]

    @property
    def router(self) -> bytes:
        return self._routed[1]

    @cached_property
    def _routed(self) -> tuple[Manifest, bytes]:
        from node.local_swarm.default_manifest import default_manifest

        base = default_manifest(self.seed, self.name).model_dump(mode="json", exclude_none=True)
        manifest = manifest_from_table(_merged(base, self.changes))
        if self.route_from is None:
            return manifest, b""
        from node.data.feed import with_router

        routed, router = with_router(manifest, self.route_from)
        return routed, router.to_bytes()

    @cached_property
    def members_of(self) -> dict[str, tuple[int, ...]]:
        """The first peers by group, counted through all groups from 0."""
        ends = [sum(group.peers for group in self.groups[: number + 1]) for number in range(len(self.groups))]
        return {group.name: tuple(range(end - group.peers, end)) for group, end in zip(self.groups, ends, strict=True)}

    @property
    def sites(self) -> list[Site]:
        return [group.site for group in self.groups for _ in range(group.peers)]

    def members(self, named: Any) -> tuple[int, ...]:
        """Returns the peers in a list of indices and names of groups. Raises ValueError."""
        if not isinstance(named, list):
            raise ValueError("must be a list of peers")
        peers = len(self.sites)
        members: list[int] = []
        for item in named:
            if isinstance(item, str) and item in self.members_of:
                members += self.members_of[item]
            elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < peers:
                members.append(item)
            else:
                raise ValueError(f"{item!r} is neither a group nor a peer from 0 to {peers - 1}")
        if not members:
            raise ValueError("names nobody")
        return tuple(dict.fromkeys(members))

    def everywhere(self, profile: str) -> Scenario:
        """Returns the scenario with all peers, later ones too, behind this profile. Raises ConfigError."""
        profile_of(profile)
        events = (
            each.model_copy(update={"profile": profile}) if isinstance(each, Start) else each for each in self.events
        )
        groups = (Group(name=group.name, peers=group.peers, profile=profile) for group in self.groups)
        return self.model_copy(update={"groups": tuple(groups), "events": tuple(events)})

    def undisturbed(self) -> Scenario:
        """Returns the scenario without events. One without expectations gets an ideal network, too."""
        calm = self if self.chaos is not None else self.everywhere("none")
        return calm.model_copy(update={"name": f"{self.name}, undisturbed", "events": (), "chaos": None})


def find_scenarios(names: list[str]) -> list[Path]:
    """Returns the files meant by names, paths, and `all`, each once. Raises ConfigError for anything else."""
    known = known_scenarios()
    found: list[Path] = []
    for name in names:
        if name == ALL:
            found += known.values()
        elif name in known or Path(name).is_file():
            found.append(known.get(name, Path(name)))
        else:
            raise ConfigError(
                f"{name!r} is neither a scenario nor a file", hint="`skipstone chaos --list` shows the scenarios."
            )
    return list(dict.fromkeys(found))


def known_scenarios() -> dict[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def read_scenario(path: Path) -> tuple[Scenario, str]:
    """Reads a scenario and its text from a file. Raises ConfigError, and ManifestError for a key under `manifest`."""
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"the scenario {path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the scenario {path} is not TOML: {error}") from None
    return scenario_from_table(table), text


def scenario_from_table(table: Mapping[str, Any]) -> Scenario:
    """Makes a scenario from a table. Raises as `read_scenario`; a ConfigError names the key."""
    scenario = read_table(Scenario, {key: value for key, value in table.items() if key != "event"})
    if len(scenario.members_of) < len(scenario.groups):
        raise ConfigError("group: there are two groups of the same name")
    peers, stages = len(scenario.sites), scenario.manifest.stages.count
    if peers < stages:
        raise ConfigError(f"group: {peers} peers cannot host {stages} stages")
    listed = table.get("event", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ConfigError("event must be tables: write [[event]]")
    events = [_event(item, f"event[{number}]", scenario) for number, item in enumerate(listed)]
    if sum(len(each.moments(peers, 0)) for each in events if isinstance(each, Churn)) >= MAX_REPLACEMENTS:
        raise ConfigError(f"event: {MAX_REPLACEMENTS} replacements are too many")
    return scenario.model_copy(update={"events": tuple(sorted(events, key=lambda event: event.at_s))})


def _event(values: dict[str, Any], where: str, scenario: Scenario) -> ScenarioEvent:
    keys = {key: value for key, value in values.items() if key != "action"}
    kind = EVENTS.get(str(values.get("action")))
    if kind is None:
        raise ConfigError(f"{where}.action: {values.get('action')!r} is none of {', '.join(EVENTS)}")
    event = read_table(kind, keys, where, scenario)
    if isinstance(event, Churn) and not event.for_s:
        return event.model_copy(update={"for_s": max(0.1, scenario.duration_s - event.at_s)})
    return event


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        under = result.get(key)
        result[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result
