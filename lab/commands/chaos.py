"""`skipstone chaos`: a local swarm, faults by a script, and a verdict."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.commands.teller import Teller
from node.cli.views.interrupts import until_stopped
from node.cli.views.output import announce, print_json, run_loop
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from lab.chaos.chaos_scenario import ChaosScenario


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
    from lab.chaos.chaos_scenario import ChaosScenario, find_scenarios, known_scenarios
    from lab.experiment.scenario import read_scenario

    if listing:
        _list([read_scenario(path, ChaosScenario)[0] for path in known_scenarios().values()], as_json=json)
        return
    if not scenarios or out is None:
        raise ConfigError("chaos needs scenarios and a folder", hint="Write `skipstone chaos all --out DIR`.")
    read = [read_scenario(path, ChaosScenario) for path in find_scenarios(scenarios)]
    if len({scenario.name for scenario, _ in read}) < len(read):
        raise ConfigError("two of the scenarios have the same name", hint="Their folders would be the same.")
    from lab.chaos.chaos_report import report_json
    from lab.chaos.suite import Suite

    stop = asyncio.Event()
    suite = Suite(out, Teller(as_json=json).tell, stop)
    done, exit_code = run_loop(until_stopped(suite.run(read), stop, suite.kill))
    if json:
        print_json(report_json(done))
    else:
        typer.echo(
            f"{sum(each.passed for each in done)} of {len(done)} passed, of {len(read)} asked for; begin with "
            f"{out / 'report.md'}"
        )
    all_passed = len(done) == len(read) and all(each.passed for each in done)
    raise typer.Exit(exit_code or (0 if all_passed else 1))


def _list(scenarios: list[ChaosScenario], *, as_json: bool) -> None:
    if as_json:
        print_json({"scenarios": {scenario.name: scenario.chaos.fault for scenario in scenarios}})
        return
    width = max(len(scenario.name) for scenario in scenarios)
    for scenario in scenarios:
        typer.echo(f"{scenario.name:{width}}  {scenario.chaos.fault}")
