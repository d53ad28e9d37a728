"""The report of an experiment: report.md, and plots of each run."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.outcome import WINDOW_S, Outcome, Row
from lab.scenario import PACE_SHARE, Scenario
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId, short

SHOWN_OBJECTIONS = 10
MAX_LINES = 12
# Inches.
_SIZE = (9, 4.5)


@dataclass(frozen=True, slots=True)
class Result:
    """A scenario and its outcome, which is None if the swarm did not start."""

    scenario: Scenario
    outcome: Outcome | None
    objections: tuple[str, ...]
    plots: tuple[str, ...] = ()
    why_no_plots: str | None = None

    @property
    def passed(self) -> bool:
        return not self.objections

    def as_json(self) -> dict[str, Any]:
        if self.outcome is not None:
            return {**self.outcome.as_json(), "plots": list(self.plots)}
        expected = self.scenario.chaos
        return {
            "name": self.scenario.name,
            "fault": None if expected is None else expected.fault,
            "seed": self.scenario.seed,
            "passed": False,
            "objections": list(self.objections),
            "recovery_s": None,
            "recovery_limit_s": None if expected is None else expected.recovery_s,
        }


def suite_json(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "passed": all(each.passed for each in results),
        "window_s": WINDOW_S,
        "share": PACE_SHARE,
        "scenarios": [each.as_json() for each in results],
    }


def suite_text(results: Sequence[Result]) -> str:
    """Formats the report.md of several scenarios: one row and one section per scenario."""
    head = ["scenario", "fault", "passed", "recovery s", "pace back s", "all served s", "pace before /s", "lost"]
    parts = [
        "# Chaos",
        f"{sum(each.passed for each in results)} of {len(results)} scenarios passed.",
        _table(head, (_cells(each) for each in results)),
        f"Recovery: seconds until a window of {WINDOW_S:g} s with at least {PACE_SHARE:g} of the pace before the first"
        " fault, and with every module served. It counts from the fault, or from its end if it lasts. The table shows"
        " the longest.",
        *(f"## {each.scenario.name}\n\n{_section(each, f'{each.scenario.name}/')}" for each in results),
    ]
    return "\n\n".join(parts) + "\n"


def report_text(result: Result) -> str:
    """Formats the report.md of a single scenario."""
    return f"# {result.scenario.name}\n\n{_section(result, '')}\n"


def _section(result: Result, folder: str) -> str:
    scenario, outcome = result.scenario, result.outcome
    stages = scenario.manifest.stages
    groups = "; ".join(
        f"{group.peers} peers `{group.name}` (peers {members[0]} to {members[-1]}) behind `{group.profile}`"
        for group, members in zip(scenario.groups, scenario.members_of.values(), strict=True)
    )
    ran = (
        f"{groups}; {stages.count} stages, a path visits {stages.visited_per_path} of them after stage 0; "
        f"seed {scenario.seed}."
    )
    objections = [f"* **{each}**" for each in result.objections[:SHOWN_OBJECTIONS]]
    if len(result.objections) > SHOWN_OBJECTIONS:
        objections.append(f"* and {len(result.objections) - SHOWN_OBJECTIONS} more")
    if outcome is not None:
        ran += f" It ran {outcome.seconds:.1f} s, after {outcome.started_after_s:.1f} s of start-up."
    parts = ["" if scenario.chaos is None else f"{scenario.chaos.fault}.", ran, "\n".join(objections)]
    if outcome is not None:
        parts += [_figures(outcome), _check(outcome), _traffic(outcome), _diary(outcome)]
        parts += [f"![{name}]({folder}{name})" for name in result.plots]
    return "\n\n".join(part for part in parts if part)


def _cells(result: Result) -> list[str]:
    outcome = result.outcome
    cells = [result.scenario.name, result.scenario.chaos.fault if result.scenario.chaos else "-"]
    cells.append("yes" if result.passed else "**no**")
    if outcome is None:
        return [*cells, "-", "-", "-", "-", "nothing"]
    pace = max((each.pace_s for each in outcome.counted), default=math.nan)
    served = max((each.served_s for each in outcome.counted), default=math.nan)
    lost = ", ".join(f"{number} {what}" for what, number in outcome.lost.items()) or "nothing"
    return [*cells, *(_seconds(value) for value in (outcome.recovery_s, pace, served)), f"{outcome.pace:.1f}", lost]


def _figures(outcome: Outcome) -> str:
    columns = {"this run": _column(outcome)}
    if outcome.undisturbed is not None:
        columns["undisturbed, equal tokens"] = _column(outcome.undisturbed)
    rows = [[what, *(column[what] for column in columns.values())] for what in columns["this run"]]
    if outcome.undisturbed is not None:
        rows.append(["loss relative to the undisturbed run", _number(outcome.loss_ratio, 4), "1"])
    return _table(["figure", *columns], rows)


def _column(outcome: Outcome) -> dict[str, str]:
    sent = sum(outcome.traffic("up").values())
    slowest = "-" if outcome.slowest is None else "{:.0f} (stage {})".format(*outcome.slowest)
    return {
        "steps": str(outcome.steps),
        "tokens": str(outcome.tokens),
        "tokens/s": f"{outcome.tokens_per_s:.0f}",
        "capacity of the slowest stage, tokens/s": slowest,
        "share of compute": _number(outcome.share_of_compute, 3),
        "time spent computing, peers after stage 0": _number(outcome.utilization, 3),
        "training loss, first step": _number(outcome.loss_first, 4),
        "training loss, last tenth of the tokens": _number(outcome.loss_last, 4),
        "held-out loss": _number(outcome.held_out_loss, 4),
        "bytes sent by all peers": f"{sent / 1e6:.1f} MB",
        "bytes a token": _number(sent / outcome.tokens if outcome.tokens else None, 0),
    }


def _check(outcome: Outcome) -> str:
    check, peaks = outcome.report, outcome.peaks
    counts = ", ".join(f"{what} {number}" for what, number in sorted(check.counts.items()))
    lines = [
        f"`skipstone check`: **{f'{len(check.violations)} violations' if check.violations else 'ok'}**; "
        f"{check.logs} logs, {check.ended_well} with a clean end; {counts}."
    ]
    lines += [
        f"{short(PeerId(peer))} was accused by {len(about.by)} peers; {about.with_it} of their {about.commits} later"
        " rounds included it."
        for peer, about in outcome.accused.items()
    ]
    most = f"{peaks.memory_bytes / 2**20:.0f} MiB, {peaks.descriptors} descriptors, {peaks.threads} threads"
    return "\n".join([*lines, f"Largest use of a node: {most}."])


def _traffic(outcome: Outcome) -> str:
    up, down = outcome.traffic("up"), outcome.traffic("down")
    rows = []
    for peer in sorted(up.keys() | down.keys(), key=int):
        sizes = [up.get(peer, 0) / 1e6, down.get(peer, 0) / 1e6]
        rates = (f"{size * 8 / outcome.seconds:.2f}" for size in sizes)
        rows.append([peer, *(f"{size:.1f}" for size in sizes), *rates])
    table = _table(["peer", "sent MB", "received MB", "sent Mbit/s", "received Mbit/s"], rows)
    return f"Traffic, including TLS and the DHT:\n\n{table}" if rows else ""


def _diary(outcome: Outcome) -> str:
    recoveries = {each.mark: each for each in outcome.recoveries}
    lines = []
    for mark in outcome.marks:
        after = ""
        if (recovery := recoveries.get(mark)) is not None:
            after = f"; pace back after {_seconds(recovery.pace_s)} s, all served after {_seconds(recovery.served_s)} s"
        lines.append(f"* {mark.at_s:.1f} s: {mark.what}{after}")
    return "\n".join(["Events:", "", *lines]) if lines else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1f}" if math.isfinite(value) else "never"


# Runs by their name in the legend.
Runs = Mapping[str, Sequence[Row]]


def draw(folder: Path, outcome: Outcome) -> tuple[str, ...]:
    """Plots loss, throughput and traffic into `folder`. Returns file names. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = 'Run `pip install "skipstone[plot]"`.'
        raise ConfigError("no plots: matplotlib is not installed", hint=hint) from None
    runs: Runs = {run.scenario.name: run.rows for run in (outcome, outcome.undisturbed) if run is not None}
    plots: dict[str, Callable[[Any], None]] = {
        "loss_over_time.png": lambda axes: _lines(axes, runs, "at", "loss", "seconds", "loss"),
        "loss_over_tokens.png": lambda axes: _lines(axes, runs, "tokens", "loss", "tokens", "loss"),
        "throughput.png": lambda axes: _lines(axes, runs, "at", "tokens_per_s", "seconds", "tokens per second"),
        "traffic.png": lambda axes: _links(axes, outcome.rows),
    }
    for name, plot in plots.items():
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots()
        plot(axes)
        # Marks have times, not token counts.
        if name != "loss_over_tokens.png":
            for mark in outcome.marks:
                axes.axvline(mark.at_s, color="0.75", linewidth=0.8, zorder=0)
        try:
            figure.savefig(folder / name)
        except OSError as error:
            raise ConfigError(f"cannot write {folder / name}: {error.strerror or error}") from None
    return tuple(plots)


def _lines(axes: Any, runs: Runs, across: str, up: str, x: str, y: str) -> None:
    for name, rows in runs.items():
        points = [(getattr(row, across), getattr(row, up)) for row in rows if getattr(row, up) is not None]
        axes.plot([point[0] for point in points], [point[1] for point in points], label=name)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend()


def _links(axes: Any, rows: Sequence[Row]) -> None:
    sums: Counter[str] = Counter()
    for row in rows:
        sums.update(row.links)
    # Only the busiest links: more lines are unreadable.
    for link, _ in sums.most_common(MAX_LINES):
        axes.plot([row.at for row in rows], [row.links.get(link, 0) / 1e6 for row in rows], label=link, linewidth=1)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MB per second, by link (from>to)")
    if sums:
        axes.legend(fontsize=7, ncols=2)
