"""What one wants to know of a running swarm without taking part in it: `status` and `eval`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from node.network.asking import parse_answer
from node.network.loss_report import WHOLE_MODEL, AskedPaths, loss_in, loss_report
from node.network.session import NetworkSession, visit
from protocol.interfaces.transport import Question, QuestionAbout
from protocol.manifest.join_link import JoinLink
from swarm.vocabulary.announcement import Announcement
from swarm.vocabulary.errors import PeerError
from swarm.vocabulary.types import ModuleId, PeerId

STATUS_TIMEOUT_S = 5.0
EVALUATION_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PeerReport:
    """One peer of a run: what it announces, and what it answered when asked."""

    announcement: Announcement
    answered: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """Keys as in docs/PROTOCOL.md."""
        said = self.announcement
        return {
            "peer": said.peer,
            "module": None if said.module is None else str(said.module),
            "state": said.state.name.lower(),
            "addresses": list(said.addresses),
            "via": list(said.via),
            "tokens_per_s": said.tokens_per_second,
            "slots": said.slots,
            "free_slots": said.free_slots,
            "steps": said.steps,
            "round": 0 if said.anchor is None else said.anchor.round,
            "digest": "" if said.anchor is None else said.anchor.digest.hex(),
            "answered": self.answered,
        }


async def query_status(link: JoinLink, patience_s: float = 30.0) -> dict[str, Any]:
    """The swarm as its peers tell it: stages, replicas, speeds, and each data node's loss and counts.

    Returns the object that `status --json` prints: run, name, stages (how many), of all data nodes step, loss, tokens,
    tokens_per_s, microbatches and waiting_for, and peers (see `PeerReport.as_json`).

    Raises:
        Unreachable: no peer of the run answered within `patience_s` seconds.
    """
    async with visit(link) as session:
        signed = await session.fetch_manifest(patience_s)
        seen = await session.look_around(signed.manifest)
        reports = [PeerReport(a, answered) for a, answered in zip(seen, await _ask_all(session, seen), strict=True)]
    return _summary(link, signed.manifest.name, signed.manifest.stages.count, reports)


async def query_evaluation(
    link: JoinLink, microbatches: int, paths: AskedPaths = WHOLE_MODEL, patience_s: float = 30.0
) -> dict[str, Any]:
    """Held-out loss through the running swarm, as one of its data nodes measures it: see
    `node.network.loss_report.loss_report`.

    Raises:
        ConfigError: the run has not so many stages.
        Unreachable: no data node could measure it.
    """
    async with visit(link) as session:
        signed = await session.fetch_manifest(patience_s)
        subsets = paths.of(signed.manifest)

        async def ask(peer: PeerId) -> dict[str, Any]:
            measured = []
            for stages in subsets:
                question = Question(QuestionAbout.EVALUATE, microbatches, stages=stages)
                answer = await session.transport.ask(peer, question, EVALUATION_TIMEOUT_S)
                measured.append((stages, loss_in(parse_answer(answer))))
            return loss_report(measured)

        def is_data_node(peer: PeerId) -> bool:
            announcement = session.membership.get(peer)
            return announcement is not None and announcement.module == ModuleId(0)

        what = "that hosts stage 0 has measured the held-out loss"
        return await session.first_answer(ask, is_data_node, patience_s, what)


async def _ask_all(session: NetworkSession, announcements: list[Announcement]) -> list[dict[str, Any] | None]:
    async def ask(peer: PeerId) -> dict[str, Any] | None:
        try:
            return parse_answer(await session.transport.ask(peer, Question(QuestionAbout.STATUS), STATUS_TIMEOUT_S))
        except PeerError:
            return None

    return list(await asyncio.gather(*(ask(announcement.peer) for announcement in announcements)))


def _summary(link: JoinLink, name: str, stages: int, reports: list[PeerReport]) -> dict[str, Any]:
    data = [r.answered for r in reports if r.answered is not None and r.announcement.module == ModuleId(0)]
    losses = [d["loss_last"] for d in data if isinstance(d.get("loss_last"), float)]
    counts = ("started", "completed", "abandoned", "duplicated")
    return {
        "run": link.run,
        "name": name,
        "stages": stages,
        "step": max((_number(d, "steps") for d in data), default=None),
        "loss": sum(losses) / len(losses) if losses else None,
        "tokens": sum(_number(d, "tokens") for d in data),
        "tokens_per_s": sum(_number(d, "tokens_per_s") for d in data),
        "microbatches": {key: sum(_number(d.get("counts"), key) for d in data) for key in counts},
        "waiting_for": sorted({str(m) for d in data for m in _list(d.get("waiting_for"))}),
        "peers": [report.as_json() for report in sorted(reports, key=lambda r: r.announcement.peer)],
    }


def _number(table: Any, key: str) -> Any:
    """A peer's number, or 0 where it says something else."""
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
