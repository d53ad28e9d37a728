"""The content of report.md: what ran, what came of it, and when what happened, on a page."""

from __future__ import annotations

from collections.abc import Sequence

from lab.experiment.report_parts import counts_text, markdown_table, number_text
from lab.experiment.scenario import Scenario
from lab.wan.outcome import Outcome

SHOWN_VIOLATIONS = 10


def report_text(scenario: Scenario, outcome: Outcome, undisturbed: Outcome | None, plots: Sequence[str]) -> str:
    """The content of report.md. `plots` are names of pictures beside it."""
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
    """The held-out loss over that of the undisturbed run, at equal tokens; of the training loss where one was not
    measured.
    """
    for one, other in (
        (outcome.held_out_loss, undisturbed.held_out_loss),
        (outcome.loss_last, undisturbed.loss_last),
    ):
        if one is not None and other:
            return one / other
    return None


def _what_ran(scenario: Scenario, outcome: Outcome) -> str:
    groups = "; ".join(
        (f"{group.peers} peers `{group.name}` (peers {members[0]} to {members[-1]}) behind `{group.profile}`")
        for group, members in zip(scenario.groups, scenario.members_of.values(), strict=True)
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
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    if undisturbed is not None:
        rows.append(["loss over the undisturbed one's", number_text(loss_ratio(outcome, undisturbed), 4), "1"])
    return markdown_table(head, rows)


def _column(outcome: Outcome) -> dict[str, str]:
    bound, slowest = outcome.capacity.bound, outcome.capacity.slowest
    return {
        "steps": str(outcome.steps),
        "tokens": str(outcome.tokens),
        "tokens/s": f"{outcome.tokens_per_s:.0f}",
        "what the slowest stage could compute, tokens/s": "-" if bound is None else f"{bound:.0f} (stage {slowest})",
        "share of compute": number_text(outcome.share_of_compute, 3),
        "peers after stage 0: share of their time computing": number_text(outcome.utilization, 3),
        "training loss, first step": number_text(outcome.loss_first, 4),
        "training loss, last tenth of the tokens": number_text(outcome.loss_last, 4),
        "held-out loss": number_text(outcome.held_out_loss, 4),
        "bytes sent by all peers": f"{sum(outcome.up_bytes.values()) / 1e6:.1f} MB",
        "bytes a token": number_text(sum(outcome.up_bytes.values()) / outcome.tokens if outcome.tokens else None, 0),
    }


def _verdict(outcome: Outcome) -> str:
    check = outcome.check
    lines = [
        f"`skipstone check`: **{'ok' if not check.violations else 'violations'}**; {check.logs} logs,"
        f" {check.ended_well} with a clean end; {counts_text(check)}."
    ]
    lines += [f"* {found.rule}: {found.message}" for found in check.violations[:SHOWN_VIOLATIONS]]
    lines += [f"* peer {peer} failed with exit code {code}" for peer, code in sorted(outcome.failures.items())]
    return "\n".join(lines)


def _traffic(outcome: Outcome) -> str:
    rows = []
    for peer in sorted(outcome.up_bytes.keys() | outcome.down_bytes.keys(), key=int):
        sizes = [outcome.up_bytes.get(peer, 0) / 1e6, outcome.down_bytes.get(peer, 0) / 1e6]
        rows.append(
            [peer, *(f"{size:.1f}" for size in sizes), *(f"{size * 8 / outcome.seconds:.2f}" for size in sizes)]
        )
    head = ["peer", "sent MB", "got MB", "sent Mbit/s", "got Mbit/s"]
    return f"Traffic, TLS and the DHT included:\n\n{markdown_table(head, rows)}" if rows else ""


def _diary(outcome: Outcome) -> str:
    if not outcome.diary:
        return ""
    return "\n".join(["What happened:", "", *(f"* {each.at_s:.1f} s: {each.what}" for each in outcome.diary)])
