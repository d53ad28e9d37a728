"""The events of a scenario. Each is a table of the file and carries itself out in the laboratory."""

from __future__ import annotations

import asyncio
import random
import resource
import signal
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from lab.emulation.emulation import Way
from lab.emulation.link_shape import MBIT, Fault, Site, profile_of
from lab.laboratory import Laboratory, send_signal
from node.local_swarm.setup import node_command
from node.observability.events import RoundProgress
from node.observability.failpoints import POINTS, VARIABLE, crash_at
from swarm.vocabulary.errors import ConfigError

LONGEST_S = 7 * 24 * 3600.0
MAX_TEXT = 100
MAX_REPLACEMENTS: Final = 10_000
CHILDREN: Final = {"dht": "protocol.dht.process", "p2pd": "p2pd"}
"""Module of the DHT's process and program of its daemon."""
IN_AN_EXCHANGE = range(1, 100)
"""Progress of a leader, in percent, at which it has received some pieces and not all."""
OUTLIVED_S = 65.0
"""Longer than any record of a peer is valid, in seconds: who still knows the peer has heard from it since."""
MAX_CLOCK_S: Final = 10 * 365 * 24 * 3600.0


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT), AfterValidator(_printable)]
Moment = Annotated[float, Field(ge=0, le=LONGEST_S)]
"""Seconds after the run began."""
Span = Annotated[float, Field(ge=0.1, le=LONGEST_S)]
"""A duration in seconds. A default of 0 means never, or no end."""


class ScenarioTable(BaseModel):
    """A strict table of a scenario file. The field `for_s` or `from_` is the key `for` or `from`."""

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
"""A list of indices and names of groups."""
Sides = Annotated[tuple[tuple[int, ...], ...], BeforeValidator(_sides)]
"""Two or more such lists without a common peer."""
Stage = Annotated[int, Field(ge=0), AfterValidator(_hosted)]
Expert = Annotated[int, Field(ge=0)]

_Delay = Annotated[float, Field(ge=0, le=60_000)]
_Rate = Annotated[float, Field(ge=0.01, le=1e6)]


class LinkTable(ScenarioTable):
    """The changes of a link; None leaves the value as it is."""

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
        """Returns the changes in words, for the diary."""
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
"""Field of the link, unit and words of each key."""

Kind = TypeVar("Kind", bound=ScenarioTable)


def read_table(kind: type[Kind], values: Any, where: str = "", scenario: object = None) -> Kind:
    """Reads a table at the path `where`. Raises ConfigError with the path of the first wrong key."""
    try:
        return kind.model_validate(values, context=scenario, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ConfigError(_explained(dict(error.errors()[0]), where)) from None


def _explained(error: Mapping[str, Any], where: str) -> str:
    path = where
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    match error["type"]:
        case "extra_forbidden":
            return f"{path} is no key of a scenario here"
        case "missing":
            return f"{path} is missing"
        case "tuple_type":
            return f"{path} must be tables: write [[{path}]]"
        case "value_error":
            return f"{path}: {error['ctx']['error']}"
        case _:
            return f"{path}: {error['msg']}, not {str(error['input'])[:MAX_TEXT]!r}"


class ScenarioEvent(ScenarioTable):
    """Something that happens at a moment; `NAME` is its action in the file."""

    NAME: ClassVar[str]
    at_s: Moment

    @property
    def over_s(self) -> float:
        """The end of the event, as far as the file says."""
        return self.at_s + float(getattr(self, "for_s", 0.0))

    @abstractmethod
    def do(self, lab: Laboratory) -> None:
        """Starts the event and notes it in the diary. Raises SkipstoneError if it is not possible now."""


class Reshape(ScenarioEvent, LinkTable):
    """Gives peers another link: a profile's, then the changes."""

    NAME = "shape"
    peers: Peers
    profile: ProfileName | None = None

    def do(self, lab: Laboratory) -> None:
        for peer in self.peers:
            before = lab.emulation.site(peer) if self.profile is None else profile_of(self.profile).site
            lab.emulation.place(peer, self.applied_to(before))
        what = ", ".join(filter(None, (self.profile, *self.link_in_words())))
        lab.fault(f"{named(self.peers)} got another link: {what or 'the same'}")


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
    """Starts a peer, behind the first group's link if no other is named."""

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
    """Silently cuts the sides off from each other, for a while or until a `Heal`."""

    NAME = "partition"
    sides: Sides
    for_s: Span = 0.0

    def do(self, lab: Laboratory) -> None:
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
    """Replaces a share of the first peers each minute, each in its own slice of the time."""

    NAME = "churn"
    share_per_minute: Annotated[float, Field(ge=0.001, le=10)]
    for_s: Span = 0.0
    """0 in the file: for the rest of the scenario's duration."""

    def moments(self, peers: int, seed: int) -> Sequence[float]:
        """Returns the times of the replacements: the same with the same seed."""
        slice_s = 60.0 / (self.share_per_minute * peers)
        lots = random.Random(f"{seed} churn {self.at_s:g}")  # noqa: S311 - no secret
        number = min(round(self.for_s / slice_s), MAX_REPLACEMENTS)
        return [self.at_s + (turn + lots.random()) * slice_s for turn in range(number)]

    def do(self, lab: Laboratory) -> None:
        lab.later(self._replace(lab), f"{self.share_per_minute:g} of the peers a minute to be replaced")

    async def _replace(self, lab: Laboratory) -> None:
        for at_s in self.moments(len(lab.sites), lab.seed):
            await asyncio.sleep(max(0.0, at_s - lab.now()))
            lab.attempt("replace", partial(replace_one, lab))


def replace_one(lab: Laboratory) -> None:
    """Kills a random peer and starts another for its module, at its site. Spares a module's last replica."""
    serving: dict[str | None, list[int]] = {}
    for index, peer in lab.serving().items():
        if index not in lab.killed:
            serving.setdefault(peer.module, []).append(index)
    spare = [index for replicas in serving.values() if len(replicas) > 1 for index in sorted(replicas)]
    if not spare:
        lab.fault("nobody could be spared to be replaced")
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
        before = {peer: emulation.site(peer) for peer in self.peers}
        for peer, site in before.items():
            emulation.place(peer, self.applied_to(site))

        def mend() -> None:
            for peer, site in before.items():
                emulation.place(peer, site)

        lab.lasts(f"{named(self.peers)}: {', '.join(self.link_in_words())}", self.for_s, mend)


class OneWay(ScenarioEvent):
    """Blocks what some peers send to others; the way back stays open."""

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
    """Resets connections to peers in mid frame, again and again."""

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
    """Kills or stops one child of each node: the DHT's process, or its p2pd."""

    NAME = "child"
    peers: Peers
    which: Literal["dht", "p2pd"]
    for_s: Span = 0.0
    """Duration of the stop; 0 kills it."""

    def do(self, lab: Laboratory) -> None:
        program = CHILDREN[self.which]
        pids = [pid for pid in lab.processes_of(set(self.peers)) if _runs(pid, program)]
        what = f"{len(pids)} processes {program} of {named(self.peers)}"
        if len(pids) < len(self.peers):
            lab.miss(f"only {what} were there")
        if not self.for_s:
            send_signal(pids, signal.SIGKILL)
            lab.fault(f"{what} killed")
            return
        send_signal(pids, signal.SIGSTOP)
        lab.lasts(f"{what} stand still", self.for_s, lambda: send_signal(pids, signal.SIGCONT))


class FullDisk(ScenarioEvent):
    """Makes every write to a file fail, as on a full disk (EFBIG in place of ENOSPC)."""

    NAME = "full_disk"
    peers: Peers
    for_s: Span

    def do(self, lab: Laboratory) -> None:
        pids = [pid for peer, pid in lab.swarm.processes().items() if peer in self.peers]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid, (_, most) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))

        def free() -> None:
            for pid, limit in limits.items():
                if Path(f"/proc/{pid}").exists():
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

        lab.lasts(f"the disk of {named(self.peers)} is full", self.for_s, free)


def _known_point(name: str) -> str:
    if name not in POINTS:
        raise ValueError(f"{name!r} is none of {', '.join(POINTS)}")
    return name


class Crash(ScenarioEvent):
    """Starts a peer that kills itself at a named point (`node.observability.failpoints`)."""

    NAME = "crash"
    stage: Stage
    point: Annotated[str, AfterValidator(_known_point)]
    nth: Annotated[int, Field(ge=1, le=10**9)] = 1
    again: bool = False
    """Starts it again after the crash, with its identity."""
    leave_after_s: Span = 0.0
    """Delay from serving until it is asked to leave; 0 for never."""

    def do(self, lab: Laboratory) -> None:
        command = ("/usr/bin/env", f"{VARIABLE}={crash_at(self.point, self.nth)}", *node_command())
        peer = lab.start(self.stage, lab.sites[0], command)
        lab.note(f"peer {peer} started for stage {self.stage}; it will kill itself at `{self.point}`")
        lab.later(self._follow(lab, peer), f"peer {peer} to come to `{self.point}`")

    async def _follow(self, lab: Laboratory, peer: int) -> None:
        if self.leave_after_s:
            await lab.until_serving(peer)
            await asyncio.sleep(self.leave_after_s)
            lab.swarm.terminate(peer)
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
    """Ends peers and starts them again with their identities."""

    NAME = "restart"
    peers: Peers
    politely: bool = False
    """SIGTERM to one after the other; else SIGKILL to all at once."""
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
    """Error of the clock from the start, in seconds ahead."""
    step_s: Annotated[float, Field(ge=-MAX_CLOCK_S, le=MAX_CLOCK_S)] = 0.0
    """Later change of the clock, in seconds forward."""
    step_after_s: Annotated[float, Field(ge=1, le=LONGEST_S)] = 0.0
    """Delay of that change; a peer with a right clock must have been visited before."""
    protocol: Annotated[str, Field(pattern=r"^[0-9]{1,9}-[0-9]{1,9}$")] | None = None
    works: bool = False
    """Whether the others should work with it, or exclude it."""

    @model_validator(mode="after")
    def _is_odd(self) -> Self:
        if not self.oddities:
            raise ValueError("clock and step and protocol are missing: there is nothing odd")
        if bool(self.step_s) != bool(self.step_after_s):
            raise ValueError("step and step_after go together: one says how far, the other when")
        return self

    @property
    def oddities(self) -> tuple[str, ...]:
        """The options of `lab.faulty_node`."""
        given = {"clock": self.clock_s and f"{self.clock_s:g}", "step": self.step_s and f"{self.step_s:g}"}
        return tuple(f"--{key}={value}" for key, value in (given | {"protocol": self.protocol}).items() if value)

    def do(self, lab: Laboratory) -> None:
        peer = lab.start(self.stage, lab.sites[0], _module_command("faulty_node", *self.oddities))
        lab.odd[peer] = self.works
        if self.step_s:
            lab.later(self._step(lab, peer), f"peer {peer} to be worked with after its clock was set")
        elif self.works:
            lab.later(lab.until_visited(peer), f"somebody to work with peer {peer}")
        lab.fault(f"peer {peer} started for stage {self.stage} with {' '.join(self.oddities)}")

    async def _step(self, lab: Laboratory, peer: int) -> None:
        starts_right = not self.clock_s
        await asyncio.sleep(self.step_after_s)
        if starts_right:
            await lab.until_visited(peer)
        send_signal((lab.swarm.processes()[peer],), signal.SIGUSR1)
        lab.fault(f"the clock of peer {peer} is set")
        if starts_right:
            await asyncio.sleep(OUTLIVED_S)
        lab.watch.visits.pop(lab.swarm.peers[peer].peer, None)
        await lab.until_visited(peer)
        lab.note(f"peer {peer} is worked with after its clock was set")


class Lie(ScenarioEvent):
    """Starts a replica that lies in rounds (`lab.lying_node`)."""

    NAME = "lie"
    stage: Stage
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0

    def do(self, lab: Laboratory) -> None:
        peer = lab.start(self.stage, lab.sites[0], _module_command("lying_node", f"--seed={self.seed}"))
        lab.liars.add(lab.swarm.peers[peer].peer)
        lab.killed.add(peer)  # however it ends
        lab.later(lab.until_visited(peer), f"peer {peer} to be at work")
        lab.note(f"peer {peer} started for stage {self.stage}; it lies in rounds")


class FreezeLeader(ScenarioEvent):
    """Freezes the leader of a stage's next round in the middle of the exchange."""

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
        what = f"peer {peer}, convener of round {progress.round}, frozen at {progress.percent} %"
        lab.lasts(what, self.for_s, lambda: lab.thaw((peer,)))

    def _is_it(self, progress: RoundProgress) -> bool:
        mine = progress.module.partition(".")[0] == str(self.stage) and progress.peer == progress.convener
        return mine and progress.percent in IN_AN_EXCHANGE


EVENTS: Final[Mapping[str, type[ScenarioEvent]]] = {kind.NAME: kind for kind in ScenarioEvent.__subclasses__()}


def named(peers: Sequence[int]) -> str:
    numbers = ", ".join(str(peer) for peer in peers)
    return f"peer {numbers}" if len(peers) == 1 else f"peers {numbers}"


def _module_command(module: str, *options: str) -> tuple[str, ...]:
    # By its path: an installation names the packages of the wheel only, which `lab` is none of.
    return (sys.executable, "-P", str(Path(__file__).with_name(f"{module}.py")), *options, "--")


def _runs(pid: int, program: str) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return False
    return program in words if program == CHILDREN["dht"] else Path(words[0]).name == program
