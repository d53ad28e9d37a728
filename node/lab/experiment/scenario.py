"""The scenario of an experiment: which swarm, behind which links, and what happens when. Read from TOML and checked key
by key.

docs/LAB.md shows one. Every ConfigError names the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import Field, InstanceOf

from node.lab.emulation.link_shape import Site, profile_of
from node.lab.experiment.scenario_events import EVENTS, MAX_REPLACEMENTS, Churn, ScenarioEvent, Start
from node.lab.experiment.scenario_table import LONGEST_S, LinkTable, ProfileName, ScenarioTable, Text, read_table
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import ConfigError

MAX_PEERS: Final = 256
MAX_BYTES: Final = 256 * 1024


class Group(LinkTable):
    """A group of peers with the same link: a profile's, and what differs from it."""

    name: Text
    peers: Annotated[int, Field(ge=1, le=MAX_PEERS)]
    profile: ProfileName

    @cached_property
    def site(self) -> Site:
        """The peers' site."""
        return self.applied_to(profile_of(self.profile).site)


class Scenario(ScenarioTable):
    """A scenario as read; times count from the moment when the run has begun."""

    KINDS: ClassVar[Mapping[str, type[ScenarioEvent]]] = {kind.NAME: kind for kind in EVENTS}
    """What can happen, by action."""
    BASE: ClassVar[Mapping[str, Any]] = {}
    """What the manifest says otherwise than the demo run before the scenario's own table does."""

    name: Text
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    duration_s: Annotated[float, Field(ge=1, le=LONGEST_S)]
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of each node."""
    held_out: Annotated[int, Field(ge=0, le=256)] = 16
    """Held-out microbatches that are measured at the end; 0 for none."""
    route_from: Text | None = None
    """Text, as of the manifest's `data.source`, by which documents are routed to experts; None for by chance."""
    groups: Annotated[tuple[Group, ...], Field(alias="group", strict=False)] = ()
    changes: dict[str, Any] = Field(default_factory=dict, alias="manifest")
    """Of the manifest."""
    events: Annotated[tuple[InstanceOf[ScenarioEvent], ...], Field(alias="event")] = ()
    """In order of time."""

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest: the small demo run with what the scenario says otherwise. Raises ManifestError, and
        ConfigError where no router can be fitted."""
        return self._routed[0]

    @property
    def router(self) -> bytes:
        """The router that the manifest names, if it names one."""
        return self._routed[1]

    @cached_property
    def _routed(self) -> tuple[Manifest, bytes]:
        from node.local_swarm.default_manifest import default_manifest

        base = default_manifest(self.seed, self.name).model_dump(mode="json", exclude_none=True)
        manifest = manifest_from_table(_merged(_merged(base, self.BASE), self.changes))
        if self.route_from is None:
            return manifest, b""
        from node.data.feed import with_router

        routed, router = with_router(manifest, self.route_from)
        return routed, router.to_bytes()

    @cached_property
    def members_of(self) -> dict[str, tuple[int, ...]]:
        """The peers of the beginning by group, counted through all groups from 0."""
        ends = [sum(group.peers for group in self.groups[: number + 1]) for number in range(len(self.groups))]
        return {group.name: tuple(range(end - group.peers, end)) for group, end in zip(self.groups, ends, strict=True)}

    @property
    def peers(self) -> int:
        """The number of peers at the beginning."""
        return sum(group.peers for group in self.groups)

    def site_of(self, peer: int) -> Site:
        """The site of a peer of the beginning."""
        return next(group.site for group in self.groups if peer in self.members_of[group.name])

    def members(self, named: Any) -> tuple[int, ...]:
        """The indices that a list of indices and names of groups means. Raises ValueError."""
        if not isinstance(named, list):
            raise ValueError("must be a list of peers")
        members: list[int] = []
        for item in named:
            if isinstance(item, str) and item in self.members_of:
                members += self.members_of[item]
            elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < self.peers:
                members.append(item)
            else:
                raise ValueError(f"{item!r} is neither a group nor a peer from 0 to {self.peers - 1}")
        if not members:
            raise ValueError("names nobody")
        return tuple(dict.fromkeys(members))

    def everywhere(self, profile: str) -> Scenario:
        """The scenario with every peer behind this profile, those that are started later too. Raises ConfigError when
        there is none.
        """
        profile_of(profile)
        events = (
            each.model_copy(update={"profile": profile}) if isinstance(each, Start) else each for each in self.events
        )
        groups = (Group(name=group.name, peers=group.peers, profile=profile) for group in self.groups)
        return self.model_copy(update={"groups": tuple(groups), "events": tuple(events)})

    def undisturbed(self) -> Scenario:
        """The scenario with an ideal network, in which nothing happens."""
        return self.everywhere("none").uneventful()

    def uneventful(self) -> Scenario:
        """The scenario without its events."""
        return self.model_copy(update={"name": f"{self.name}, undisturbed", "events": ()})


Read = TypeVar("Read", bound=Scenario)


def read_scenario(path: Path, kind: type[Read]) -> tuple[Read, str]:
    """Reads the scenario in a file; returns it with the file's text.

    Raises:
        ConfigError: it cannot be read, or a key is wrong.
        ManifestError: likewise a key under `manifest`.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the scenario {path} cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"the scenario {path} has more than {MAX_BYTES} bytes")
    try:
        text = raw.decode()
        table = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the scenario {path} is not TOML: {error}") from None
    return scenario_from_table(table, kind), text


def scenario_from_table(table: Mapping[str, Any], kind: type[Read]) -> Read:
    """Checks every key of a table and makes the scenario; errors as `read_scenario`."""
    scenario = read_table(kind, {key: value for key, value in table.items() if key != "event"})
    if len(scenario.members_of) < len(scenario.groups):
        raise ConfigError("group: there are two groups of the same name")
    if scenario.peers < scenario.manifest.stages.count:
        raise ConfigError(f"group: {scenario.peers} peers cannot host {scenario.manifest.stages.count} stages")
    listed = table.get("event", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ConfigError("event must be tables: write [[event]]")
    events = [_event(item, f"event[{number}]", scenario) for number, item in enumerate(listed)]
    if sum(len(each.moments(scenario)) for each in events if isinstance(each, Churn)) >= MAX_REPLACEMENTS:
        raise ConfigError(f"event: {MAX_REPLACEMENTS} replacements are too many")
    return scenario.model_copy(update={"events": tuple(sorted(events, key=lambda event: event.at_s))})


def _event(values: dict[str, Any], where: str, scenario: Scenario) -> ScenarioEvent:
    keys = {key: value for key, value in values.items() if key != "action"}
    kind = scenario.KINDS.get(str(values.get("action")))
    if kind is None:
        raise ConfigError(f"{where}.action: {values.get('action')!r} is none of {', '.join(scenario.KINDS)}")
    return read_table(kind, keys, where, scenario)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The base with what the changes say otherwise, tables within tables likewise."""
    result = dict(base)
    for key, value in changes.items():
        under = result.get(key)
        result[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result
