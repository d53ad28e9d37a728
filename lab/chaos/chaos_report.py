"""report.md and report.json of several trials: a row for each, and below it what happened when.

All trials in one picture: microbatches a second, and a line where something was broken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.chaos.chaos_scenario import ChaosScenario
from lab.chaos.recovery import SHARE, WINDOW_S, Recovery
from lab.chaos.verdict import Trial, losses, objections
from lab.experiment.metrics import Kind
from lab.experiment.report_parts import counts_text, markdown_table, new_figure, save_figure
from swarm.vocabulary.errors import ConfigError
from swarm.vocabulary.types import PeerId, short

SHOWN_OBJECTIONS = 10
NAME = "chaos.png"
ACROSS = 4


@dataclass(frozen=True, slots=True)
class Judged:
    """A scenario with what was seen of it, and the objections to it. There is no trial when its swarm could not be
    started.
    """

    scenario: ChaosScenario
    trial: Trial | None
    objections: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.objections

    @property
    def counted(self) -> tuple[Recovery, ...]:
        """The recoveries for which the limit holds."""
        return () if self.trial is None else tuple(each for each in self.trial.recoveries if each.counts)

    @property
    def recovery_s(self) -> float:
        """The longest recovery, in seconds."""
        return max((each.seconds for each in self.counted), default=math.nan)

    def as_json(self) -> dict[str, Any]:
        """The scenario's entry of report.json. Seconds are null for never."""
        trial = self.trial
        found: dict[str, Any] = {
            "name": self.scenario.name,
            "fault": self.scenario.chaos.fault,
            "seed": self.scenario.seed,
            "passed": self.passed,
            "objections": list(self.objections),
            "recovery_s": _finite(self.recovery_s),
            "recovery_limit_s": self.scenario.chaos.recovery_s,
        }
        if trial is None:
            return found
        return found | {
            "started_after_s": round(trial.started_after_s, 2),
            "seconds": round(trial.seconds, 2),
            "microbatches_per_s_before": round(trial.pace, 2),
            "recoveries": [_recovery_json(each) for each in trial.recoveries],
            "rerouted_for_s": None if trial.rerouted_for_s is None else round(trial.rerouted_for_s, 2),
            "lost": losses(trial.report),
            "counts": trial.report.counts,
            "tokens": trial.tokens,
            "held_out": trial.held_out,
            "held_out_undisturbed": trial.undisturbed,
            "loss_ratio": trial.loss_ratio,
            "liars": sorted(trial.liars),
            "accused": {peer: asdict(about) | {"by": sorted(about.by)} for peer, about in trial.accused.items()},
            "peaks": asdict(trial.resources),
            "events": [{"at": round(m.at_s, 2), "kind": m.kind.value, "what": m.what} for m in trial.marks],
        }


def judged(trial: Trial) -> Judged:
    """A trial with its verdict."""
    return Judged(trial.scenario, trial, objections(trial))


def report_json(all_judged: Sequence[Judged]) -> dict[str, Any]:
    """The content of report.json."""
    return {
        "passed": all(each.passed for each in all_judged),
        "window_s": WINDOW_S,
        "share": SHARE,
        "scenarios": [each.as_json() for each in all_judged],
    }


def report_text(all_judged: Sequence[Judged], picture: str | None) -> str:
    """The content of report.md. `picture` is the name of one beside it."""
    passed = sum(each.passed for each in all_judged)
    parts = [
        "# Chaos",
        f"{passed} of {len(all_judged)} scenarios passed.",
        table(all_judged),
        f"Recovery: seconds until a window of {WINDOW_S:g} s begins in which at least {SHARE:g} of the pace "
        "before the first fault"
        " is made, and every module has a serving replica; the longest of the scenario, from the fault, or "
        "from its end where it lasts."
        " What the pace did meanwhile is below and in report.json.",
        *([f"![{picture}]({picture})"] if picture else []),
        *(_section(each) for each in all_judged),
    ]
    return "\n\n".join(parts) + "\n"


def table(all_judged: Sequence[Judged]) -> str:
    """The table with a row for each scenario."""
    head = ["scenario", "fault", "passed", "recovery s", "pace back s", "all served s", "pace before /s", "lost"]
    return markdown_table(head, (_cells(each) for each in all_judged))


def _cells(each: Judged) -> list[str]:
    trial = each.trial
    pace = max((recovery.pace_s for recovery in each.counted), default=math.nan)
    served = max((recovery.served_s for recovery in each.counted), default=math.nan)
    lost = {} if trial is None else losses(trial.report)
    return [
        each.scenario.name,
        each.scenario.chaos.fault,
        "yes" if each.passed else "**no**",
        *(_seconds(value) for value in (each.recovery_s, pace, served)),
        "-" if trial is None else f"{trial.pace:.1f}",
        ", ".join(f"{number} {what}" for what, number in lost.items()) or "nothing",
    ]


def _section(each: Judged) -> str:
    lines = [f"## {each.scenario.name}", "", each.scenario.chaos.fault + ".", ""]
    lines += [f"* **{objection}**" for objection in each.objections[:SHOWN_OBJECTIONS]]
    if len(each.objections) > SHOWN_OBJECTIONS:
        lines.append(f"* and {len(each.objections) - SHOWN_OBJECTIONS} more")
    return "\n".join(lines if each.trial is None else [*lines, *_seen(each.trial), "", *_diary(each.trial)])


def _seen(trial: Trial) -> list[str]:
    report, peaks = trial.report, trial.resources
    lines = [f"* check: {len(report.violations)} violations; {report.logs} logs; {counts_text(report)}"]
    if trial.loss_ratio is not None:
        lines.append(
            f"* held-out loss after {trial.tokens} tokens: {trial.held_out:.4f}, undisturbed {trial.undisturbed:.4f}:"
            f" {trial.loss_ratio:.4f} times"
        )
    lines += [
        f"* {short(PeerId(peer))} was accused by {len(about.by)}; of the {about.commits} rounds that they committed "
        f"since, {about.with_it} had it in"
        for peer, about in trial.accused.items()
    ]
    return [
        *lines,
        f"* most of a node: {peaks.memory_bytes / 2**20:.0f} MiB, {peaks.descriptors} descriptors, "
        f"{peaks.threads} threads",
    ]


def _diary(trial: Trial) -> list[str]:
    recoveries = {each.mark: each for each in trial.recoveries}
    lines = []
    for mark in trial.marks:
        after = ""
        if (recovery := recoveries.get(mark)) is not None:
            after = f"; pace back after {_seconds(recovery.pace_s)} s, all served after {_seconds(recovery.served_s)} s"
        lines.append(f"* {mark.at_s:.1f} s: {mark.what}{after}")
    return lines


def _recovery_json(recovery: Recovery) -> dict[str, Any]:
    return {
        "at": round(recovery.mark.at_s, 2),
        "what": recovery.mark.what,
        "from": recovery.mark.kind.value,
        "limited": recovery.counts,
        "pace_s": _finite(recovery.pace_s),
        "served_s": _finite(recovery.served_s),
    }


def _finite(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1f}" if math.isfinite(value) else "never"


_COLOURS = {Kind.FAULT: "tab:red", Kind.END: "tab:green"}


def draw(folder: Path, trials: Sequence[Trial]) -> str | None:
    """Draws the picture and returns its name; None where matplotlib is not installed or there is nothing to draw."""
    if not trials:
        return None
    down = math.ceil(len(trials) / ACROSS)
    try:
        figure = new_figure(4 * ACROSS, 2.2 * down)
    except ConfigError:
        return None
    grid = figure.subplots(down, ACROSS, squeeze=False)
    for axes in grid.flat[len(trials) :]:
        axes.set_axis_off()
    for axes, trial in zip(grid.flat, trials, strict=False):
        _draw_one(axes, trial)
    save_figure(figure, folder / NAME)
    return NAME


def _draw_one(axes: Any, trial: Trial) -> None:
    counts = Counter(int(at) for at in trial.completed)
    seconds = range(int(trial.seconds))
    axes.step(list(seconds), [counts[second] for second in seconds], where="post", linewidth=1)
    for mark in trial.marks:
        if mark.kind in _COLOURS:
            axes.axvline(mark.at_s, color=_COLOURS[mark.kind], linewidth=0.8)
    axes.set_title(trial.scenario.name, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
