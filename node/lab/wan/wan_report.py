"""report.md: what ran, what came of it, and when what happened, on a page."""

from __future__ import annotations

from collections.abc import Sequence

from node.lab.wan.outcome import Outcome
from node.lab.wan.scenario import Scenario

SHOWN_VIOLATIONS = 10


def report_text(scenario: Scenario, outcome: Outcome, undisturbed: Outcome | None, plots: Sequence[str]) -> str:
    """The whole file. `plots` are names of pictures beside it."""
    parts = [
        f"# {scenario.name}",
        _what_ran(scenario, outcome),
        _figures(outcome, undisturbed),
        _verdict(outcome),
        _traffic(outcome),
        _diary(outcome),
        *(f"![{name}]({name})" for name in plots),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def loss_ratio(outcome: Outcome, undisturbed: Outcome) -> float | None:
    """Held-out loss over that of the undisturbed run, at equal tokens; of the training loss where one was not
    measured."""
    for one, other in (
        (outcome.held_out_loss, undisturbed.held_out_loss),
        (outcome.loss_last, undisturbed.loss_last),
    ):
        if one is not None and other:
            return one / other
    return None


def _what_ran(scenario: Scenario, outcome: Outcome) -> str:
    groups = "; ".join(
        (
            f"{len(group.peers)} peers `{group.name}` (peers {group.peers[0]} to {group.peers[-1]}) behind "
            f"`{group.profile}`"
        )
        for group in scenario.groups
    )
    stages = scenario.manifest.stages
    return (
        f"{groups}; {stages.count} stages, of which a path visits {stages.visited_per_path} after stage 0; "
        f"seed {scenario.seed}."
        f" {outcome.seconds:.1f} s from the first step, which came {outcome.started_after_s:.1f} s after the start."
    )


def _figures(outcome: Outcome, undisturbed: Outcome | None) -> str:
    head = ["figure", "this run"]
    columns = [_column(outcome)]
    if undisturbed is not None:
        head.append("undisturbed, equal tokens")
        columns.append(_column(undisturbed))
    lines = [_row(head), _row(["---"] * len(head))]
    lines += [_row([what, *(column[what] for column in columns)]) for what in columns[0]]
    if undisturbed is not None:
        ratio = loss_ratio(outcome, undisturbed)
        lines.append(_row(["loss over the undisturbed one's", "-" if ratio is None else f"{ratio:.4f}", "1"]))
    return "\n".join(lines)


def _column(outcome: Outcome) -> dict[str, str]:
    bound, slowest = outcome.capacity.bound, outcome.capacity.slowest
    return {
        "steps": str(outcome.steps),
        "tokens": str(outcome.tokens),
        "tokens/s": f"{outcome.tokens_per_s:.0f}",
        "what the slowest stage could compute, tokens/s": "-" if bound is None else f"{bound:.0f} (stage {slowest})",
        "share of compute": _number(outcome.share_of_compute, 3),
        "peers after stage 0: share of their time computing": _number(outcome.utilization, 3),
        "training loss, first step": _number(outcome.loss_first, 4),
        "training loss, last tenth of the tokens": _number(outcome.loss_last, 4),
        "held-out loss": _number(outcome.held_out_loss, 4),
        "bytes sent by all peers": f"{sum(outcome.up_bytes.values()) / 1e6:.1f} MB",
        "bytes a token": _number(sum(outcome.up_bytes.values()) / outcome.tokens if outcome.tokens else None, 0),
    }


def _verdict(outcome: Outcome) -> str:
    check = outcome.check
    lines = [
        f"`skipstone check`: **{'ok' if not check.violations else 'violations'}**; {check.logs} logs,"
        f" {check.ended_well} with a clean end; "
        + ", ".join(f"{what} {number}" for what, number in sorted(check.counts.items()))
        + "."
    ]
    lines += [f"* {found.rule}: {found.message}" for found in check.violations[:SHOWN_VIOLATIONS]]
    lines += [f"* peer {peer} failed with exit code {code}" for peer, code in sorted(outcome.failures.items())]
    return "\n".join(lines)


def _traffic(outcome: Outcome) -> str:
    lines = [_row(["peer", "sent MB", "got MB", "sent Mbit/s", "got Mbit/s"]), _row(["---"] * 5)]
    for peer in sorted(outcome.up_bytes.keys() | outcome.down_bytes.keys(), key=int):
        up, down = outcome.up_bytes.get(peer, 0), outcome.down_bytes.get(peer, 0)
        rates = [f"{size * 8 / 1e6 / outcome.seconds:.2f}" for size in (up, down)]
        lines.append(_row([peer, f"{up / 1e6:.1f}", f"{down / 1e6:.1f}", *rates]))
    return "\n".join(["Traffic, TLS and the DHT included:", "", *lines]) if len(lines) > 2 else ""


def _diary(outcome: Outcome) -> str:
    if not outcome.diary:
        return ""
    return "\n".join(["What happened:", "", *(f"* {each.at_s:.1f} s: {each.what}" for each in outcome.diary)])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
