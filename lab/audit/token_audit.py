"""The check of data nodes' tokens and steps: a token counts when its microbatch is completed, and neither count ever
goes back.

Within one log the tokens that are reported with a step grow by those of the microbatches that were completed in
between; where the log does not say how many each has, by the same amount for every one, in all logs of a run. And step
follows step.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.audit.findings import Findings, Life, Spot
from node.observability.events import Completed, Continued, Event, Step


@dataclass(slots=True)
class _Account:
    """Of one log, since its last step."""

    step: int = 0
    tokens: int | None = 0
    """Those of the last step; None until the first one of a node that goes on from a checkpoint."""
    completed: int = 0
    known_tokens: int = 0
    """Of those completed that say it."""
    silent: int = 0
    """Completed ones that do not."""


class TokenCheck:
    """The check as a fold: takes events in the order of each log, then judges."""

    def __init__(self) -> None:
        self._findings = Findings()
        self._accounts: dict[int, _Account] = {}
        self._of_one: int | None = None
        """Tokens of a microbatch, by the first log that says so."""

    def begin(self, life: Life) -> None:
        """Begins another log."""

    def take(self, life: Life, spot: Spot, event: Event) -> None:
        """Takes one event of the log."""
        match event:
            case Continued():
                self._account(life).tokens = None
            case Completed(tokens=tokens):
                account = self._account(life)
                account.completed += 1
                account.silent += tokens is None
                account.known_tokens += tokens or 0
            case Step() if event.peer == life.peer:
                self._step(self._account(life), spot, event)

    def judge(self) -> Findings:
        """The violations."""
        return self._findings

    def _account(self, life: Life) -> _Account:
        return self._accounts.setdefault(id(life), _Account())

    def _step(self, account: _Account, spot: Spot, event: Step) -> None:
        if account.step and event.step != account.step + 1:
            self._findings.violate("steps go forward", spot, f"step {event.step} follows step {account.step}")
        if account.tokens is not None:
            self._judge_tokens(event.tokens - account.tokens, account, spot)
        account.step, account.tokens = event.step, event.tokens
        account.completed = account.known_tokens = account.silent = 0

    def _judge_tokens(self, tokens: int, account: _Account, spot: Spot) -> None:
        completed = account.completed
        if completed and not account.silent:
            if tokens != account.known_tokens:
                message = f"{tokens} tokens were counted for {completed} completed ones of {account.known_tokens}"
                self._findings.violate("tokens", spot, message)
            return
        if self._of_one is None and completed and tokens > 0 and tokens % completed == 0:
            self._of_one = tokens // completed
        if tokens != completed * (self._of_one or 0):
            message = f"{tokens} tokens were counted for {completed} completed microbatches of {self._of_one} each"
            self._findings.violate("tokens", spot, message)
