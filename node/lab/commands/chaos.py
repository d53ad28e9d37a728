"""`skipstone chaos`: a local swarm, faults by a script, and a verdict."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.views.interrupts import until_stopped
from node.cli.views.output import announce, print_json, run_loop
from node.cli.views.text import duration, harmless
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from node.lab.chaos.chaos_report import Judged
    from node.lab.chaos.chaos_scenario import ChaosPlan


def chaos(
    scenarios: Annotated[
        list[str] | None, typer.Argument(metavar="SCENARIO...", help="Names, TOML files, or `all`.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for logs and the report.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the scenarios that come along, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Break a local swarm on purpose and judge what it makes of that. Exits with 1 if a scenario is not passed.
    docs/CHAOS.md has more."""
    announce("skipstone chaos: reading the scenarios", as_json=json)
    from node.lab.chaos.chaos_scenario import find_plans, known_plans, read_plan

    if listing:
        _list([read_plan(path) for path in known_plans().values()], as_json=json)
        return
    if not scenarios or out is None:
        raise ConfigError("chaos needs scenarios and a folder", hint="Write `skipstone chaos all --out DIR`.")
    plans = [read_plan(path) for path in find_plans(scenarios)]
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise ConfigError("two of the scenarios have the same name", hint="Their folders would be the same.")
    from node.lab.chaos.chaos_report import report_json
    from node.lab.chaos.suite import Series

    stop = asyncio.Event()
    voice = _Voice(as_json=json)
    series = Series(
        out, stop, voice.began, lambda mark: voice.say(f"  {duration(mark.at_s)}  {mark.what}"), voice.ended
    )
    done, exit_code = run_loop(until_stopped(series.run(plans), stop, series.kill))
    if json:
        print_json(report_json(done))
    else:
        typer.echo(
            f"{sum(each.passed for each in done)} of {len(done)} passed, of {len(plans)} asked for; begin with "
            f"{out / 'report.md'}"
        )
    all_passed = len(done) == len(plans) and all(each.passed for each in done)
    raise typer.Exit(exit_code or (0 if all_passed else 1))


class _Voice:
    """Lines for whoever watches. Standard output stays free for JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def began(self, plan: ChaosPlan) -> None:
        """A scenario begins."""
        self.say(f"{plan.name}: {plan.fault}")

    def ended(self, judged: Judged) -> None:
        """And ends."""
        verdict = "passed" if judged.passed else "NOT PASSED"
        self.say(f"  {verdict}, recovery {judged.recovery_s:.1f} s")
        for objection in judged.objections:
            self.say(f"    {objection}")

    def say(self, line: str) -> None:
        """One line."""
        typer.echo(harmless(line, 1000), err=self._as_json)


def _list(plans: list[ChaosPlan], *, as_json: bool) -> None:
    if as_json:
        print_json({"scenarios": {plan.name: plan.fault for plan in plans}})
        return
    width = max(len(plan.name) for plan in plans)
    for plan in plans:
        typer.echo(f"{plan.name:{width}}  {plan.fault}")
