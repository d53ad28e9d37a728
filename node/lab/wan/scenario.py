"""A scenario: which swarm, behind which links, and what happens when. Read from TOML and checked key by key.

docs/LAB.md shows one. Every ConfigError names the key.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from node.lab.emulation.link_shape import Site
from node.lab.emulation.profiles import profile_of
from node.lab.wan.scenario_events import Freeze, Happening, Heal, Kill, Partition, ReplaceOne, Reshape, Start, Stop
from node.lab.wan.toml_table import Table
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import ConfigError

MAX_PEERS: Final = 256
MAX_HAPPENINGS: Final = 10_000
MAX_BYTES: Final = 256 * 1024
LONGEST_S: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Group:
    """Peers with the same link."""

    name: str
    peers: tuple[int, ...]
    site: Site
    profile: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """As read; times count from the swarm's first step."""

    name: str
    seed: int
    duration_s: float
    groups: tuple[Group, ...]
    manifest: Manifest
    threads: int
    """CPU threads of each node."""
    held_out: int
    """Held-out microbatches that are measured at the end; 0 for none."""
    happenings: tuple[Happening, ...]
    """In order of time."""

    @property
    def peers(self) -> int:
        """At the beginning."""
        return sum(len(group.peers) for group in self.groups)

    def site_of(self, peer: int) -> Site:
        """Where a peer of the beginning stands."""
        return next(group.site for group in self.groups if peer in group.peers)

    def everywhere(self, profile: str) -> Scenario:
        """The same with every peer behind this profile, those that are started later too. Raises ConfigError when there
        is none."""
        site = profile_of(profile).site
        return replace(
            self,
            groups=tuple(replace(group, site=site, profile=profile) for group in self.groups),
            happenings=tuple(
                replace(happening, site=site) if isinstance(happening, Start) else happening
                for happening in self.happenings
            ),
        )

    def undisturbed(self) -> Scenario:
        """The same with an ideal network, in which nothing happens."""
        return self.everywhere("none").uneventful()

    def uneventful(self) -> Scenario:
        """The same, in which nothing happens."""
        return replace(self, name=f"{self.name}, undisturbed", happenings=())


@dataclass(frozen=True, slots=True)
class Cast:
    """What an event's reader may need to know of the scenario."""

    seed: int
    duration_s: float
    stages: int
    groups: tuple[Group, ...]

    @property
    def peers(self) -> int:
        return sum(len(group.peers) for group in self.groups)

    def read_stage(self, table: Table) -> int:
        """Raises ConfigError."""
        return int(table.number("stage", 0, self.stages - 1, whole=True))

    def read_peers(self, table: Table, key: str = "peers") -> tuple[int, ...]:
        """A list of indices and names of groups, as indices. Raises ConfigError."""
        return self._members(table.items(key), table.path(key))

    def read_sides(self, table: Table) -> tuple[tuple[int, ...], ...]:
        """Two or more such lists that share nobody. Raises ConfigError."""
        sides = []
        for number, side in enumerate(table.items("sides")):
            if not isinstance(side, list):
                raise ConfigError(f"{table.path('sides')}[{number}] must be a list of peers")
            sides.append(self._members(side, f"{table.path('sides')}[{number}]"))
        members = [member for side in sides for member in side]
        if len(sides) < 2 or len(set(members)) < len(members):
            raise ConfigError(f"{table.path('sides')} must be two or more lists that share no peer")
        return tuple(sides)

    def _members(self, items: list[Any], path: str) -> tuple[int, ...]:
        groups = {group.name: group.peers for group in self.groups}
        members: list[int] = []
        for item in items:
            if isinstance(item, str) and item in groups:
                members += groups[item]
            elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < self.peers:
                members.append(item)
            else:
                raise ConfigError(f"{path}: {item!r} is neither a group nor a peer from 0 to {self.peers - 1}")
        if not members:
            raise ConfigError(f"{path} names nobody")
        return tuple(dict.fromkeys(members))


ReadAction = Callable[[Table, float, Cast], tuple[Happening, ...]]
"""Makes of an event's table and time what happens then, which may be several things."""


def _shape(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    profile = table.text_or_none("profile")
    if profile is not None:
        profile_of(profile)
    return (Reshape(at_s, cast.read_peers(table), profile, table.shape_change()),)


def _start(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    stage = cast.read_stage(table)
    profile = table.text_or_none("profile")
    site = cast.groups[0].site if profile is None else profile_of(profile).site
    return (Start(at_s, stage, site),)


def _freeze(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    return (Freeze(at_s, cast.read_peers(table), table.number("for", 0.1, LONGEST_S)),)


def _partition(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    cut = Partition(at_s, cast.read_sides(table))
    for_s = table.number("for", 0.1, LONGEST_S, 0.0)
    return (cut, Heal(at_s + for_s)) if for_s else (cut,)


def _churn(table: Table, at_s: float, cast: Cast) -> tuple[Happening, ...]:
    """Evenly over the time, each somewhere in its own slice of it: the rate holds also for a minute or two."""
    share = table.number("share_per_minute", 0.001, 10.0)
    for_s = table.number("for", 0.1, LONGEST_S, max(0.1, cast.duration_s - at_s))
    slice_s = 60.0 / (share * cast.peers)
    number = round(for_s / slice_s)
    if number > MAX_HAPPENINGS:
        raise ConfigError(f"{table.path('share_per_minute')}: {number} replacements are too many")
    randomness = random.Random(f"{cast.seed} churn {at_s}")  # noqa: S311 - no secret
    return tuple(ReplaceOne(at_s + (turn + randomness.random()) * slice_s) for turn in range(number))


ACTIONS: Final[Mapping[str, ReadAction]] = {
    "shape": _shape,
    "kill": lambda table, at_s, cast: (Kill(at_s, cast.read_peers(table)),),
    "stop": lambda table, at_s, cast: (Stop(at_s, cast.read_peers(table)),),
    "start": _start,
    "freeze": _freeze,
    "partition": _partition,
    "heal": lambda table, at_s, cast: (Heal(at_s),),
    "churn": _churn,
}


def read_scenario(path: Path, actions: Mapping[str, ReadAction] = ACTIONS) -> tuple[Scenario, str]:
    """The scenario in a file, and the file's text.

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
    return scenario_from_table(table, actions), text


def scenario_from_table(table: dict[str, Any], actions: Mapping[str, ReadAction] = ACTIONS) -> Scenario:
    """Checks every key; errors as `read_scenario`."""
    top = Table(table, "")
    name = top.text("name")
    seed = int(top.number("seed", 0, 2**31, 0, whole=True))
    duration_s = top.number("duration", 1.0, LONGEST_S)
    manifest = _manifest(top.table("manifest"), name, seed)
    cast = Cast(seed, duration_s, manifest.stages.count, _groups(top.tables("group")))
    if cast.peers < cast.stages:
        raise ConfigError(f"group: {cast.peers} peers cannot host {cast.stages} stages")
    scenario = Scenario(
        name=name,
        seed=seed,
        duration_s=duration_s,
        groups=cast.groups,
        manifest=manifest,
        threads=int(top.number("threads", 1, 1024, 1, whole=True)),
        held_out=int(top.number("held_out", 0, 256, 16, whole=True)),
        happenings=_happenings(top.tables("event"), cast, actions),
    )
    top.finish()
    return scenario


def _groups(tables: list[Table]) -> tuple[Group, ...]:
    groups: list[Group] = []
    first = 0
    for table in tables:
        name, profile = table.text("name"), table.text("profile")
        if name in (group.name for group in groups):
            raise ConfigError(f"{table.path('name')}: there are two groups {name!r}")
        number = int(table.number("peers", 1, MAX_PEERS, whole=True))
        site = profile_of(profile).site
        site = replace(site, shape=table.shape_change().applied_to(site.shape))
        groups.append(Group(name, tuple(range(first, first + number)), site, profile))
        first += number
        table.finish()
    return tuple(groups)


def _happenings(tables: list[Table], cast: Cast, actions: Mapping[str, ReadAction]) -> tuple[Happening, ...]:
    found: list[Happening] = []
    for table in tables:
        at_s = table.number("at", 0.0, LONGEST_S)
        action = table.text("action")
        if action not in actions:
            raise ConfigError(f"{table.path('action')}: {action!r} is none of {', '.join(actions)}")
        found += actions[action](table, at_s, cast)
        table.finish()
    if len(found) > MAX_HAPPENINGS:
        raise ConfigError(f"event: {len(found)} things are to happen; {MAX_HAPPENINGS} are allowed")
    return tuple(sorted(found, key=lambda happening: happening.at_s))


def _manifest(changes: dict[str, Any], name: str, seed: int) -> Manifest:
    """The small demo run with what the scenario says otherwise."""
    from node.local_swarm.default_manifest import default_manifest

    base = default_manifest(seed, name).model_dump(mode="json", exclude_none=True)
    return manifest_from_table(merged(base, changes))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The base with what the changes say otherwise, tables within tables likewise."""
    result = dict(base)
    for key, value in changes.items():
        under = result.get(key)
        result[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result
