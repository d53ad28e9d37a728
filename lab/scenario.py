"""A scenario: the swarm, its links, its timeline of events, and its expectations."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import sys
import tomllib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from lab.emulation.emulation import MBIT, Fault, Site, Way, profile_of
from lab.laboratory import Laboratory, send_signal
from node.local_swarm.setup import node_command
from node.observability.events import RoundProgress
from node.observability.failpoints import POINTS, VARIABLE
from protocol.manifest.manifest import Manifest, manifest_from_table
from swarm.vocabulary.errors import ConfigError

LONGEST_S = 7 * 24 * 3600.0
MAX_TEXT = 100
MAX_REPLACEMENTS: Final = 10_000
# Programs that a node starts, by the name in the file.
CHILDREN: Final = {"dht": "protocol.dht.process", "p2pd": "p2pd"}
# Percent of an exchange that count as its middle.
IN_AN_EXCHANGE = range(1, 100)
OUTLIVED_S = 65.0
"""Longer than any peer's record is valid, in seconds."""
MAX_CLOCK_S: Final = 10 * 365 * 24 * 3600.0


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(_printable)]
Moment = Annotated[float, Field(ge=0, le=LONGEST_S)]
Span = Annotated[float, Field(ge=0.1, le=LONGEST_S)]
"""A duration in seconds. A default of 0 means never, or without end."""


class ScenarioTable(BaseModel):
    """A strict table of a scenario file. The fields `for_s` and `from_` are the keys `for` and `from`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=lambda name: name.removesuffix("_s").removesuffix("_"),
        validate_by_name=True,
    )


def _known_profile(name: str) -> str:
    profile_of(name)
    return name


def _members(value: Any, info: ValidationInfo) -> tuple[int, ...]:
    return tuple(value) if info.context is None else info.context.members(value)


def _sides(value: Any, info: ValidationInfo) -> tuple[tuple[int, ...], ...]:
    sides = tuple(_members(side, info) for side in value) if isinstance(value, list | tuple) else ()
    members = [member for side in sides for member in side]
    if len(sides) < 2 or len(set(members)) < len(members):
        raise ValueError("must be two or more lists that share no peer")
    return sides


def _hosted(stage: int, info: ValidationInfo) -> int:
    if info.context is not None and not stage < info.context.manifest.stages.count:
        raise ValueError(f"must be a whole number from 0 to {info.context.manifest.stages.count - 1}")
    return stage


ProfileName = Annotated[str, AfterValidator(_known_profile)]
Peers = Annotated[tuple[int, ...], BeforeValidator(_members)]
Sides = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_sides)]
Stage = Annotated[int, Field(ge=0), AfterValidator(_hosted)]
Expert = Annotated[int, Field(ge=0)]

_Delay = Annotated[float, Field(ge=0, le=60_000)]
_Rate = Annotated[float, Field(ge=0.01, le=1e6)]


class LinkTable(ScenarioTable):
    """Changes of a peer's link; a property that is None stays unchanged."""

    latency_ms: _Delay | None = None
    jitter_ms: _Delay | None = None
    up_mbit: _Rate | None = None
    down_mbit: _Rate | None = None
    fault: Annotated[Fault | None, Field(strict=False)] = None

    def applied_to(self, site: Site) -> Site:
        changes: dict[str, Any] = {of: getattr(self, key) * unit for key, (of, unit, _) in self._given().items()}
        if self.fault is not None:
            changes["fault"] = self.fault
        return Site(replace(site.shape, **changes), site.region)

    def link_in_words(self) -> tuple[str, ...]:
        """Describes the changes of the link in words, for the diary."""
        words = tuple(text.format(getattr(self, key)) for key, (_, _, text) in self._given().items())
        return words if self.fault is None else (*words, f"fault {self.fault.value}")

    def _given(self) -> dict[str, tuple[str, float, str]]:
        return {key: meant for key, meant in _MEANT.items() if getattr(self, key) is not None}


_MEANT: Final = {
    "latency_ms": ("latency_s", 0.001, "latency {:g} ms"),
    "jitter_ms": ("jitter_s", 0.001, "jitter {:g} ms"),
    "up_mbit": ("up_bytes_per_s", MBIT, "{:g} Mbit/s up"),
    "down_mbit": ("down_bytes_per_s", MBIT, "{:g} Mbit/s down"),
}

Kind = TypeVar("Kind", bound=ScenarioTable)


def crash_at(point: str, nth: int) -> str:
    """Returns the value of SKIPSTONE_CRASH_AT for a failpoint. Raises ConfigError for an unknown point."""
    if point not in POINTS:
        raise ConfigError(f"{point!r} is not a crash point", hint=f"Choose one of {', '.join(sorted(POINTS))}.")
    return f"{point}:{nth}"


def read_table(kind: type[Kind], values: Any, where: str = "", scenario: object = None) -> Kind:
    """Validates a TOML table, at the path `where` in its file, as `kind`. Raises ConfigError for a wrong key."""
    try:
        return kind.model_validate(values, context=scenario, by_alias=True, by_name=False)
    except ValidationError as error:
        first, *others = error.errors()
        if first["type"] == "missing":  # perhaps because it is misspelt
            first = next((each for each in others if each["type"] == "extra_forbidden"), first)
        raise ConfigError(_explained(dict(first), where, kind)) from None


def _explained(error: Mapping[str, Any], where: str, kind: type[ScenarioTable]) -> str:
    path = where
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    match error["type"]:
        case "extra_forbidden":
            known = [field.alias or name for name, field in kind.model_fields.items()]
            nearest = get_close_matches(path.rpartition(".")[2], known, 1)
            return f"{path} is not a key here{f'; did you mean {nearest[0]}?' if nearest else ''}"
        case "missing":
            return f"{path} is missing"
        case "tuple_type":
            return f"{path} must be a list of tables: write [[{path}]]"
        case "value_error":
            return f"{path}: {error['ctx']['error']}"
        case _:
            return f"{path}: {error['msg']}, not {str(error['input'])[:MAX_TEXT]!r}"


class ScenarioEvent(ScenarioTable):
    """An event on the timeline; `NAME` is its action in the file."""

    NAME: ClassVar[str]
    at_s: Moment

    @property
    def over_s(self) -> float:
        """Time at which the event ends, in seconds, as far as the scenario's file specifies it."""
        return self.at_s + float(getattr(self, "for_s", 0.0))

    @abstractmethod
    def do(self, lab: Laboratory) -> None:
        """Starts the event and notes it in the diary. Raises SkipstoneError if it is impossible now."""


class Reshape(ScenarioEvent, LinkTable):
    """Gives peers another link, defined by a profile (or their present link) and changes to it."""

    NAME = "shape"
    peers: Peers
    profile: ProfileName | None = None

    def do(self, lab: Laboratory) -> None:
        for peer in self.peers:
            before = lab.emulation.site(peer) if self.profile is None else profile_of(self.profile).site
            lab.emulation.place(peer, self.applied_to(before))
        what = ", ".join(filter(None, (self.profile, *self.link_in_words())))
        lab.fault(f"{named(self.peers)} get another link: {what or 'the same'}")


class Kill(ScenarioEvent):
    """Kills peers and their children with SIGKILL."""

    NAME = "kill"
    peers: Peers

    def do(self, lab: Laboratory) -> None:
        for peer in self.peers:
            lab.kill(peer)
        lab.fault(f"{named(self.peers)} killed")


class Stop(ScenarioEvent):
    NAME = "stop"
    peers: Peers

    def do(self, lab: Laboratory) -> None:
        for peer in self.peers:
            lab.swarm.terminate(peer)
        lab.note(f"{named(self.peers)} asked to leave")


class Start(ScenarioEvent):
    """Starts a peer, behind the first group's link unless a profile is given."""

    NAME = "start"
    stage: Stage
    profile: ProfileName | None = None
    expert: Expert = 0

    def do(self, lab: Laboratory) -> None:
        site = lab.sites[0] if self.profile is None else profile_of(self.profile).site
        what = f"expert {self.stage}.{self.expert}" if self.expert else f"stage {self.stage}"
        lab.note(f"peer {lab.start(self.stage, site, expert=self.expert)} started for {what}")


class Freeze(ScenarioEvent):
    """Stops all processes of peers with SIGSTOP for a while."""

    NAME = "freeze"
    peers: Peers
    for_s: Span

    def do(self, lab: Laboratory) -> None:
        lab.freeze(self.peers)
        lab.lasts(f"{named(self.peers)} frozen for {self.for_s:g} s", self.for_s, lambda: lab.thaw(self.peers))


class Partition(ScenarioEvent):
    """Silently stops traffic between groups of peers, for a while or until a `Heal`."""

    NAME = "partition"
    sides: Sides
    for_s: Span = 0.0

    def do(self, lab: Laboratory) -> None:
        # Without `for` the partition lasts until a `Heal` event.
        lab.emulation.partition(self.sides)
        what = f"partition: {' | '.join(named(side) for side in self.sides)}"
        if self.for_s:
            lab.lasts(what, self.for_s, lab.emulation.heal)
        else:
            lab.fault(what, lasts=True)


class Heal(ScenarioEvent):
    NAME = "heal"

    def do(self, lab: Laboratory) -> None:
        lab.emulation.heal()
        lab.end("the partition is healed")


class Churn(ScenarioEvent):
    """Replaces random peers one by one, at a rate given as a share of the initial peers per minute."""

    NAME = "churn"
    share_per_minute: Annotated[float, Field(ge=0.001, le=10)]
    for_s: Span = 0.0

    def moments(self, peers: int, seed: int) -> Sequence[float]:
        """Returns the times at which peers are replaced, in seconds, always the same for a seed."""
        slice_s = 60.0 / (self.share_per_minute * peers)
        lots = random.Random(f"{seed} churn {self.at_s:g}")  # noqa: S311 - no secret
        # One replacement per slice, at a random moment in it.
        number = min(round(self.for_s / slice_s), MAX_REPLACEMENTS)
        return [self.at_s + (turn + lots.random()) * slice_s for turn in range(number)]

    def do(self, lab: Laboratory) -> None:
        lab.later(self._replace(lab), f"{self.share_per_minute:g} of the peers a minute to be replaced")

    async def _replace(self, lab: Laboratory) -> None:
        for at_s in self.moments(len(lab.sites), lab.seed):
            await asyncio.sleep(max(0.0, at_s - lab.now()))
            lab.attempt("replace", partial(replace_one, lab))


def replace_one(lab: Laboratory) -> None:
    """Kills a random peer and starts another one for its module at its site. Spares a module's last replica."""
    serving: dict[str | None, list[int]] = {}
    for index, peer in lab.serving().items():
        # A killed peer may look alive for a moment.
        if index not in lab.killed:
            serving.setdefault(peer.module, []).append(index)
    spare = [index for replicas in serving.values() if len(replicas) > 1 for index in sorted(replicas)]
    if not spare:
        lab.fault("no peer replaced: every module has only one replica")
        return
    victim = lab.lots.choice(spare)
    before, site = lab.swarm.progress.peers[victim], lab.emulation.site(victim)
    expert = int((before.module or "0.0").partition(".")[2])
    lab.kill(victim)
    newcomer = lab.start(before.stage, site, expert=expert)
    lab.fault(f"peer {victim} killed; peer {newcomer} started in its place for stage {before.stage}")


class Worsen(ScenarioEvent, LinkTable):
    """Gives peers a worse link for a while."""

    NAME = "worsen"
    peers: Peers
    for_s: Span

    def do(self, lab: Laboratory) -> None:
        emulation = lab.emulation
        # Other events may have changed the links, so remember the current ones.
        before = {peer: emulation.site(peer) for peer in self.peers}
        for peer, site in before.items():
            emulation.place(peer, self.applied_to(site))

        def mend() -> None:
            for peer, site in before.items():
                emulation.place(peer, site)

        lab.lasts(f"{named(self.peers)}: {', '.join(self.link_in_words())}", self.for_s, mend)


class OneWay(ScenarioEvent):
    """Blocks traffic from some peers to others. The other direction stays open."""

    NAME = "one_way"
    from_: Peers
    to: Peers
    for_s: Span

    def do(self, lab: Laboratory) -> None:
        ways: list[Way] = [(source, target) for source in self.from_ for target in self.to]
        lab.emulation.block(ways)
        what = f"nothing from {named(self.from_)} reaches {named(self.to)}"
        lab.lasts(what, self.for_s, lambda: lab.emulation.block(()))


class Resets(ScenarioEvent):
    """Resets connections of peers repeatedly, in the middle of frames."""

    NAME = "resets"
    peers: Peers
    every_bytes: Annotated[int, Field(ge=1, le=2**40)]
    for_s: Span

    def do(self, lab: Laboratory) -> None:
        def every(size_bytes: int | None) -> None:
            for peer in self.peers:
                lab.emulation.break_every(peer, size_bytes)

        every(self.every_bytes)
        what = f"{named(self.peers)}: a connection is reset every {self.every_bytes} bytes"
        lab.lasts(what, self.for_s, lambda: every(None))


class Child(ScenarioEvent):
    """Kills or stops one child process of each given node: the DHT process or its p2pd."""

    NAME = "child"
    peers: Peers
    which: Literal["dht", "p2pd"]
    for_s: Span = 0.0

    def do(self, lab: Laboratory) -> None:
        program = CHILDREN[self.which]
        pids = [pid for pid in lab.processes_of(set(self.peers)) if _runs(pid, program)]
        what = f"{len(pids)} processes {program} of {named(self.peers)}"
        if len(pids) < len(self.peers):
            lab.miss(f"found only {what}")
        if not self.for_s:
            send_signal(pids, signal.SIGKILL)
            lab.fault(f"{what} killed")
            return
        send_signal(pids, signal.SIGSTOP)
        lab.lasts(f"{what} stopped", self.for_s, lambda: send_signal(pids, signal.SIGCONT))


class FullDisk(ScenarioEvent):
    """Makes every write of peers to a file fail, as on a full disk (EFBIG instead of ENOSPC)."""

    NAME = "full_disk"
    peers: Peers
    for_s: Span

    def do(self, lab: Laboratory) -> None:
        pids = [pid for peer, pid in lab.swarm.processes().items() if peer in self.peers]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid, (_, most) in limits.items():
            # The soft limit only, so that it can be raised again.
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))

        def free() -> None:
            for pid, limit in limits.items():
                if Path(f"/proc/{pid}").exists():
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

        lab.lasts(f"the disk of {named(self.peers)} is full", self.for_s, free)


def _known_point(name: str) -> str:
    if name not in POINTS:
        raise ValueError(f"{name!r} is not one of {', '.join(sorted(POINTS))}")
    return name


class Crash(ScenarioEvent):
    """Starts a peer that kills itself at a named point (`node.observability.failpoints`)."""

    NAME = "crash"
    stage: Stage
    point: Annotated[str, AfterValidator(_known_point)]
    nth: Annotated[int, Field(ge=1, le=10**9)] = 1
    again: bool = False
    leave_after_s: Span = 0.0

    def do(self, lab: Laboratory) -> None:
        # The variable must reach this node only, not the whole swarm.
        command = ("/usr/bin/env", f"{VARIABLE}={crash_at(self.point, self.nth)}", *node_command())
        peer = lab.start(self.stage, lab.sites[0], command)
        lab.note(f"peer {peer} started for stage {self.stage}; it will kill itself at `{self.point}`")
        lab.later(self._follow(lab, peer), f"peer {peer} to come to `{self.point}`")

    async def _follow(self, lab: Laboratory, peer: int) -> None:
        if self.leave_after_s:
            await lab.until_serving(peer)
            await asyncio.sleep(self.leave_after_s)
            lab.swarm.terminate(peer)
        # The crash is planned, so it is no failure.
        lab.killed.add(peer)
        end = await lab.ended(peer)
        if end.exit_code != 128 + signal.SIGKILL:
            lab.miss(f"peer {peer} ended with {end.exit_code} before it came to `{self.point}`")
            return
        lab.fault(f"peer {peer} killed at `{self.point}`")
        if self.again:
            await lab.restarted(peer)
            lab.note(f"peer {peer} serves again")


class Restart(ScenarioEvent):
    """Stops peers and starts them again with their identities."""

    NAME = "restart"
    peers: Peers
    politely: bool = False
    gap_s: Moment = 0.0

    def do(self, lab: Laboratory) -> None:
        if self.politely:
            lab.later(self._one_by_one(lab), f"{named(self.peers)} to be restarted")
            return
        for peer in self.peers:
            lab.kill(peer)
            lab.later(self._again(lab, peer), f"peer {peer} to be restarted")
        lab.fault(f"{named(self.peers)} killed")

    async def _one_by_one(self, lab: Laboratory) -> None:
        for peer in self.peers:
            lab.swarm.terminate(peer)
            lab.fault(f"peer {peer} asked to leave")
            await self._again(lab, peer)

    async def _again(self, lab: Laboratory, peer: int) -> None:
        await lab.ended(peer)
        await asyncio.sleep(self.gap_s)
        await lab.restarted(peer)
        lab.end(f"peer {peer} serves again")


class Odd(ScenarioEvent):
    """Starts a peer with a wrong wall clock or other protocol versions (`lab.faulty_node`)."""

    NAME = "odd"
    stage: Stage
    clock_s: Annotated[float, Field(ge=-MAX_CLOCK_S, le=MAX_CLOCK_S)] = 0.0
    step_s: Annotated[float, Field(ge=-MAX_CLOCK_S, le=MAX_CLOCK_S)] = 0.0
    step_after_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 0.0
    protocol: Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,9}$")] | None = None
    works: bool = False

    @model_validator(mode="after")
    def _is_odd(self) -> Self:
        if not self.oddities:
            raise ValueError("clock, step and protocol are missing: one is needed")
        if bool(self.step_s) != bool(self.step_after_s):
            raise ValueError("step and step_after go together: the jump and its time")
        return self

    @property
    def oddities(self) -> tuple[str, ...]:
        """Options of `lab.faulty_node`, which runs a node with this wrong clock or these protocol versions."""
        given = {"clock": self.clock_s and f"{self.clock_s:g}", "step": self.step_s and f"{self.step_s:g}"}
        return tuple(f"--{key}={value}" for key, value in (given | {"protocol": self.protocol}).items() if value)

    def do(self, lab: Laboratory) -> None:
        peer = lab.start(self.stage, lab.sites[0], _module_command("faulty_node", *self.oddities))
        lab.odd[peer] = self.works
        if self.step_s:
            lab.later(self._step(lab, peer), f"peer {peer} to get work after its clock was set")
        elif self.works:
            lab.later(lab.until_visited(peer), f"a microbatch to visit peer {peer}")
        lab.fault(f"peer {peer} started for stage {self.stage} with {' '.join(self.oddities)}")

    async def _step(self, lab: Laboratory, peer: int) -> None:
        starts_right = not self.clock_s
        await asyncio.sleep(self.step_after_s)
        if starts_right:
            await lab.until_visited(peer)
        # `lab.faulty_node` moves its clock on SIGUSR1.
        send_signal((lab.swarm.processes()[peer],), signal.SIGUSR1)
        lab.fault(f"the clock of peer {peer} is set")
        # Its records from before the jump must expire.
        if starts_right:
            await asyncio.sleep(OUTLIVED_S)
        # Only visits after the jump count.
        lab.watch.visits.pop(lab.swarm.peers[peer].peer, None)
        await lab.until_visited(peer)
        lab.note(f"peer {peer} gets work after its clock was set")


class Lie(ScenarioEvent):
    """Starts a replica that cheats in rounds (`lab.lying_node`)."""

    NAME = "lie"
    stage: Stage
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0

    def do(self, lab: Laboratory) -> None:
        peer = lab.start(self.stage, lab.sites[0], _module_command("lying_node", f"--seed={self.seed}"))
        lab.liars.add(lab.swarm.peers[peer].peer)
        lab.killed.add(peer)  # its end is never a failure
        lab.later(lab.until_visited(peer), f"peer {peer} to be at work")
        lab.note(f"peer {peer} started for stage {self.stage}; it cheats in rounds")


class FreezeLeader(ScenarioEvent):
    """Freezes the leader of a stage's next averaging round while pseudo-gradients are exchanged."""

    NAME = "freeze_convener"
    stage: Stage
    for_s: Span

    def do(self, lab: Laboratory) -> None:
        lab.note(f"waiting for a round of stage {self.stage}")
        lab.later(self._follow(lab), f"a round of stage {self.stage} to be in the middle of its exchange")

    async def _follow(self, lab: Laboratory) -> None:
        progress = await lab.watch.until(self._is_it)
        peer = next(each.index for each in lab.swarm.peers if each.peer == progress.peer)
        lab.freeze((peer,))
        what = f"peer {peer}, leader of round {progress.round}, frozen at {progress.percent} %"
        lab.lasts(what, self.for_s, lambda: lab.thaw((peer,)))

    def _is_it(self, progress: RoundProgress) -> bool:
        mine = progress.module.partition(".")[0] == str(self.stage) and progress.peer == progress.convener
        return mine and progress.percent in IN_AN_EXCHANGE


EVENTS: Final[Mapping[str, type[ScenarioEvent]]] = {kind.NAME: kind for kind in ScenarioEvent.__subclasses__()}


def named(peers: Sequence[int]) -> str:
    numbers = ", ".join(str(peer) for peer in peers)
    return f"peer {numbers}" if len(peers) == 1 else f"peers {numbers}"


def _module_command(module: str, *options: str) -> tuple[str, ...]:
    # By path, because an editable install finds only the wheel's packages, not `lab`.
    return (sys.executable, "-P", str(Path(__file__).with_name(f"{module}.py")), *options, "--")


def _runs(pid: int, program: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # the process has ended
        return False
    return program in words if program == CHILDREN["dht"] else Path(words[0]).name == program


FOLDER: Final = Path(__file__).parent / "scenarios"
ALL: Final = "all"
MAX_PEERS: Final = 256
PACE_SHARE: Final = 0.5

# A small model shows faults as well, and leaves machine time for them. The link latency must bound the pace: if the
# machine did, every starting process would look like a fault.
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

Counts = dict[str, Annotated[int, Field(ge=0, le=2**53)]]


class Group(LinkTable):
    """A group of initial peers with the same link, defined by a profile and changes to it."""

    name: Text
    peers: Annotated[int, Field(ge=1, le=MAX_PEERS)]
    profile: ProfileName

    @cached_property
    def site(self) -> Site:
        return self.applied_to(profile_of(self.profile).site)


class Expectations(ScenarioTable):
    """The fault of a scenario, and limits that must hold in addition to `skipstone check`."""

    fault: Text
    recovery_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 30.0
    pace_share: Annotated[float, Field(gt=0, le=1)] = PACE_SHARE
    pace_within_s: Span | None = None
    rerouted_for_s: Span | None = None
    save_every_s: Span | None = None
    at_least: Counts = Field(default_factory=dict)
    at_most: Counts = Field(default_factory=dict)
    loss_ratio: Annotated[float, Field(ge=1, le=10)] | None = None


class Scenario(ScenarioTable):
    """A scenario as read from its file. Time zero is the start of the run."""

    name: Text
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    duration_s: Annotated[float, Field(ge=1, le=LONGEST_S)]
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    held_out: Annotated[int, Field(ge=0, le=256)] = 16
    route_from: Text | None = None
    groups: Annotated[tuple[Group, ...], Field(alias="group", strict=False)] = ()
    changes: dict[str, Any] = Field(default_factory=dict, alias="manifest")
    events: Annotated[tuple[InstanceOf[ScenarioEvent], ...], Field(alias="event")] = ()
    chaos: Expectations | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, table: Any) -> Any:
        # Only chaos scenarios get the small defaults.
        if not isinstance(table, dict) or "chaos" not in table:
            return table
        own = table.get("manifest", {})
        manifest = _merged(CHAOS_DEFAULTS["manifest"], own) if isinstance(own, dict) else own
        return {**CHAOS_DEFAULTS, **table, "manifest": manifest}

    @model_validator(mode="after")
    def _losses_are_compared_where_they_are_measured(self) -> Self:
        if self.chaos is not None and (self.chaos.loss_ratio is None) != (self.held_out == 0):
            raise ValueError(
                "chaos.loss_ratio and held_out go together: the largest ratio, and the microbatches that measure it"
            )
        return self

    @property
    def manifest(self) -> Manifest:
        """The demo run's manifest with the scenario's changes. Raises ManifestError, or ConfigError for no router."""
        return self._routed[0]

    @property
    def router(self) -> bytes:
        return self._routed[1]

    @cached_property
    def _routed(self) -> tuple[Manifest, bytes]:
        from node.local_swarm.default_manifest import default_manifest

        base = default_manifest(self.seed, self.name).model_dump(mode="json", exclude_none=True)
        base["training"]["inner"] |= {"name": "adamw", "learning_rate": 3e-3}  # as in all kept figures
        base["training"]["staleness_steps"] = 0  # the minutes of a scenario stand for the middle of a run
        manifest = manifest_from_table(_merged(base, self.changes))
        if self.route_from is None:
            return manifest, b""
        from node.data.feed import with_router

        routed, router = with_router(manifest, self.route_from)
        return routed, router.to_bytes()

    @cached_property
    def members_of(self) -> dict[str, tuple[int, ...]]:
        """Indices of the initial peers by group, numbered through all groups from 0."""
        ends = [sum(group.peers for group in self.groups[: number + 1]) for number in range(len(self.groups))]
        return {group.name: tuple(range(end - group.peers, end)) for group, end in zip(self.groups, ends, strict=True)}

    @property
    def sites(self) -> list[Site]:
        return [group.site for group in self.groups for _ in range(group.peers)]

    def members(self, named: Any) -> tuple[int, ...]:
        """Resolves a list of indices and group names to peers. Raises ValueError."""
        if not isinstance(named, list):
            raise ValueError("must be a list of peers")
        peers, members = len(self.sites), list[int]()
        for item in named:
            if isinstance(item, str) and item in self.members_of:
                members += self.members_of[item]
            elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < peers:
                members.append(item)
            else:
                raise ValueError(f"{item!r} is neither a group nor a peer from 0 to {peers - 1}")
        if not members:
            raise ValueError("must name at least one peer")
        return tuple(dict.fromkeys(members))

    def everywhere(self, profile: str) -> Scenario:
        """Returns the scenario with all peers, even those started later, behind this profile. Raises ConfigError."""
        profile_of(profile)
        events = (
            each.model_copy(update={"profile": profile}) if isinstance(each, Start) else each for each in self.events
        )
        groups = (Group(name=group.name, peers=group.peers, profile=profile) for group in self.groups)
        return self.model_copy(update={"groups": tuple(groups), "events": tuple(events)})

    def undisturbed(self) -> Scenario:
        """Returns the scenario without its events and, unless it has expectations, on an ideal network."""
        calm = self if self.chaos is not None else self.everywhere("none")
        return calm.model_copy(update={"name": f"{self.name}, undisturbed", "events": (), "chaos": None})


def find_scenarios(names: list[str]) -> list[Path]:
    """Returns the files of scenarios given by name, path or `all`, each once. Raises ConfigError for unknown names."""
    known = known_scenarios()
    found: list[Path] = []
    for name in names:
        if name == ALL:
            found += known.values()
        elif name in known or Path(name).is_file():
            found.append(known.get(name, Path(name)))
        else:
            raise ConfigError(
                f"{name!r} is neither a scenario nor a file", hint="`skipstone chaos --list` lists the scenarios."
            )
    return list(dict.fromkeys(found))


def known_scenarios() -> dict[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}


def read_scenario(path: Path) -> tuple[Scenario, str]:
    """Reads a scenario and its text from a file, or one of `lab/wan` by name. Raises ConfigError, ManifestError."""
    if not path.exists() and (FOLDER.parent / "wan" / f"{path}.toml").is_file():
        path = FOLDER.parent / "wan" / f"{path}.toml"
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the scenario {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the scenario {path} is not TOML: {error}") from None
    return scenario_from_table(table), text


def scenario_from_table(table: Mapping[str, Any]) -> Scenario:
    """Builds a scenario from a table. Raises as `read_scenario`; a ConfigError names the key."""
    scenario = read_table(Scenario, {key: value for key, value in table.items() if key != "event"})
    if len(scenario.members_of) < len(scenario.groups):
        raise ConfigError("group: two groups have the same name")
    peers, stages = len(scenario.sites), scenario.manifest.stages.count
    if peers < stages:
        raise ConfigError(f"group: {peers} peers cannot host {stages} stages")
    listed = table.get("event", [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise ConfigError("event must be a list of tables: write [[event]]")
    # Events refer to groups and stages, so read them last.
    events = [_event(item, f"event[{number}]", scenario) for number, item in enumerate(listed)]
    if sum(len(each.moments(peers, 0)) for each in events if isinstance(each, Churn)) >= MAX_REPLACEMENTS:
        raise ConfigError(f"event: churn must replace fewer than {MAX_REPLACEMENTS} peers")
    return scenario.model_copy(update={"events": tuple(sorted(events, key=lambda event: event.at_s))})


def _event(values: dict[str, Any], where: str, scenario: Scenario) -> ScenarioEvent:
    keys = {key: value for key, value in values.items() if key != "action"}
    kind = EVENTS.get(str(values.get("action")))
    if kind is None:
        raise ConfigError(f"{where}.action: {values.get('action')!r} is not one of {', '.join(EVENTS)}")
    event = read_table(kind, keys, where, scenario)
    # Without `for`, churn lasts until the end of the scenario.
    if isinstance(event, Churn) and not event.for_s:
        return event.model_copy(update={"for_s": max(0.1, scenario.duration_s - event.at_s)})
    return event


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        under = result.get(key)
        result[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return result
