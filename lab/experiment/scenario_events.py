"""The events that any scenario can have. Each event is read from its own keys and carries itself out."""

from __future__ import annotations

import asyncio
import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from pydantic import Field

from lab.emulation.link_shape import profile_of
from lab.experiment.scenario_table import (
    Expert,
    LinkTable,
    Moment,
    Peers,
    ProfileName,
    ScenarioTable,
    Sides,
    Span,
    Stage,
)

if TYPE_CHECKING:
    from lab.experiment.run import Run
    from lab.experiment.scenario import Scenario

MAX_REPLACEMENTS: Final = 10_000
"""So many in a scenario are too many."""


class ScenarioEvent(ScenarioTable):
    """Something that happens at a moment. `NAME` is its action in the file."""

    NAME: ClassVar[str]
    at_s: Moment

    @property
    def over_s(self) -> float:
        """The time when it is over, as far as the file says."""
        return self.at_s + float(getattr(self, "for_s", 0.0))

    @abstractmethod
    def do(self, run: Run) -> None:
        """Carries the event out, and notes in the diary what was done. Returns at once; what takes time goes on in
        tasks of the run.

        Raises:
            SkipstoneError: it is not possible just now.
        """


class Reshape(ScenarioEvent, LinkTable):
    """Gives peers another link: a profile's first if there is one, then what changes."""

    NAME = "shape"
    peers: Peers
    profile: ProfileName | None = None

    def do(self, run: Run) -> None:
        for peer in self.peers:
            before = run.lab.emulation.site(peer) if self.profile is None else profile_of(self.profile).site
            run.lab.emulation.place(peer, self.applied_to(before))
        what = ", ".join(filter(None, (self.profile, *self.link_in_words())))
        run.fault(f"{named(self.peers)} got another link: {what or 'the same'}")


class Kill(ScenarioEvent):
    """Kills peers with SIGKILL, and all they have started with them."""

    NAME = "kill"
    peers: Peers

    def do(self, run: Run) -> None:
        for peer in self.peers:
            run.lab.kill(peer)
        run.fault(f"{named(self.peers)} killed")


class Stop(ScenarioEvent):
    """Asks peers to leave in good order."""

    NAME = "stop"
    peers: Peers

    def do(self, run: Run) -> None:
        for peer in self.peers:
            run.lab.swarm.terminate(peer)
        run.note(f"{named(self.peers)} asked to leave")


class Start(ScenarioEvent):
    """Starts a peer, behind the first group's link if no other is named."""

    NAME = "start"
    stage: Stage
    profile: ProfileName | None = None
    expert: Expert = 0

    def do(self, run: Run) -> None:
        site = run.first_site if self.profile is None else profile_of(self.profile).site
        what = f"expert {self.stage}.{self.expert}" if self.expert else f"stage {self.stage}"
        run.note(f"peer {run.lab.start(self.stage, site, expert=self.expert)} started for {what}")


class Freeze(ScenarioEvent):
    """Stops peers (SIGSTOP to every process of theirs) for a while."""

    NAME = "freeze"
    peers: Peers
    for_s: Span

    def do(self, run: Run) -> None:
        run.lab.freeze(self.peers)
        run.lasts(f"{named(self.peers)} frozen for {self.for_s:g} s", self.for_s, lambda: run.lab.thaw(self.peers))


class Partition(ScenarioEvent):
    """Cuts the sides off from each other, and nobody is told; without `for_s` a `Heal` ends it."""

    NAME = "partition"
    sides: Sides
    for_s: Span = 0.0

    def do(self, run: Run) -> None:
        run.lab.emulation.partition(self.sides)
        what = f"partition: {' | '.join(named(side) for side in self.sides)}"
        if self.for_s:
            run.lasts(what, self.for_s, run.lab.emulation.heal)
        else:
            run.fault(what, lasts=True)


class Heal(ScenarioEvent):
    """Ends a partition."""

    NAME = "heal"

    def do(self, run: Run) -> None:
        run.lab.emulation.heal()
        run.end("the partition is healed")


class ReplaceOne(ScenarioEvent):
    """Kills a peer drawn by lot, and starts another one with the same link for its stage. A module's last replica is
    spared. Comes from `Churn` alone.
    """

    NAME = "replace"

    def do(self, run: Run) -> None:
        lab = run.lab
        serving: dict[str | None, list[int]] = {}
        for index, peer in lab.serving().items():
            if index not in lab.killed:
                serving.setdefault(peer.module, []).append(index)
        spare = [index for replicas in serving.values() if len(replicas) > 1 for index in sorted(replicas)]
        if not spare:
            run.fault("nobody could be spared to be replaced")
            return
        victim = run.lots.choice(spare)
        told, site = lab.swarm.progress.peers[victim], lab.emulation.site(victim)
        expert = int((told.module or "0.0").partition(".")[2])
        lab.kill(victim)
        newcomer = lab.start(told.stage, site, expert=expert)
        run.fault(f"peer {victim} killed; peer {newcomer} started in its place for stage {told.stage}")


class Churn(ScenarioEvent):
    """Replaces a share of the peers of the beginning each minute: evenly over the time, each somewhere in its own slice
    of it, so that the rate holds also for a minute or two.
    """

    NAME = "churn"
    share_per_minute: Annotated[float, Field(ge=0.001, le=10)]
    for_s: Span = 0.0
    """0 for the rest of the scenario's duration."""

    def moments(self, scenario: Scenario) -> Sequence[float]:
        """The times at which a peer is replaced: the same with the same seed."""
        slice_s = 60.0 / (self.share_per_minute * scenario.peers)
        number = round((self.for_s or max(0.1, scenario.duration_s - self.at_s)) / slice_s)
        lots = random.Random(f"{scenario.seed} churn {self.at_s:g}")  # noqa: S311 - no secret
        return [self.at_s + (turn + lots.random()) * slice_s for turn in range(min(number, MAX_REPLACEMENTS))]

    def do(self, run: Run) -> None:
        run.later(self._replace(run), f"{self.share_per_minute:g} of the peers a minute to be replaced")

    async def _replace(self, run: Run) -> None:
        for at_s in self.moments(run.scenario):
            await asyncio.sleep(max(0.0, at_s - run.now()))
            run.do(ReplaceOne(at_s=at_s))


EVENTS: Final[tuple[type[ScenarioEvent], ...]] = (Reshape, Kill, Stop, Start, Freeze, Partition, Heal, Churn)


def named(peers: Sequence[int]) -> str:
    """The peers' names in a sentence."""
    numbers = ", ".join(str(peer) for peer in peers)
    return f"peer {numbers}" if len(peers) == 1 else f"peers {numbers}"
