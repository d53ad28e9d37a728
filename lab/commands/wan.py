"""`skipstone wan`: a local swarm behind emulated links, disturbed by a script."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lab.commands.teller import Teller
from node.cli.views.interrupts import until_stopped
from node.cli.views.output import announce, print_json, run_loop
from node.cli.views.text import count, loss_text
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from lab.wan.measurement import Result


def wan(
    scenario: Annotated[
        Path | None, typer.Argument(metavar="SCENARIO", help="A TOML file; docs/LAB.md has one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for logs, metrics, plots and the report.")] = None,
    profile: Annotated[str | None, typer.Option(help="All peers behind this link, whatever the scenario says.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Then the same without links and events, for as many tokens.")
    ] = False,
    profiles: Annotated[bool, typer.Option("--profiles", help="List the links that have a name, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Run a scenario: a local swarm behind slow, far or faulty links. Ctrl-C ends it early, in good order, with a
    report."""
    announce(
        "skipstone wan: links that have a name" if profiles else "skipstone wan: reading the scenario", as_json=json
    )
    if profiles:
        _list_profiles(as_json=json)
        return
    if scenario is None or out is None:
        raise ConfigError("wan needs a scenario and a folder", hint="Write `skipstone wan SCENARIO --out DIR`.")
    from lab.experiment.scenario import Scenario, read_scenario

    read, text = read_scenario(scenario, Scenario)
    if profile is not None:
        read, text = read.everywhere(profile), f"# run with --profile {profile}\n{text}"
    from lab.wan.measurement import Measurement
    from node.data.places import as_written
    from node.data.sources import open_source

    if read.manifest.data.is_of_files:
        data = read.manifest.data
        open_source(
            data, as_written(data).text
        )  # a missing folder is said once, not by every node that was started for nothing
    teller = Teller(as_json=json)
    stop = asyncio.Event()
    measurement = Measurement(out, teller.tell, stop)
    result, exit_code = run_loop(until_stopped(measurement.run(read, text, compare=compare), stop, measurement.kill))
    teller.end()
    if json:
        print_json(result.as_json())
    else:
        _show(result, out)
    raise typer.Exit(exit_code or (1 if result.outcome.check.violations else 0))


def _show(result: Result, folder: Path) -> None:
    outcome = result.outcome
    share = "" if outcome.share_of_compute is None else f", {outcome.share_of_compute:.0%} of what it could compute"
    loss = outcome.loss_last if outcome.held_out_loss is None else outcome.held_out_loss
    held_out = "" if outcome.held_out_loss is None else "held-out "
    typer.echo(
        f"{count(outcome.tokens)} tokens, {count(outcome.tokens_per_s)} tokens/s{share}; {held_out}loss "
        f"{loss_text(loss)}"
    )
    ratio = result.as_json()["loss_ratio"]
    if ratio is not None:
        typer.echo(f"the undisturbed run, at equal tokens: {ratio:.4f} times its loss")
    violations = len(outcome.check.violations)
    typer.echo(f"skipstone check: {f'{violations} violations' if violations else 'ok'}")
    if result.why_no_plots is not None:
        typer.echo(result.why_no_plots)
    typer.echo(f"all of it is in {folder}; begin with {folder / 'report.md'}")


def _list_profiles(*, as_json: bool) -> None:
    from lab.emulation.link_shape import PROFILES
    from lab.emulation.netem import netem_works

    netem = netem_works()
    if as_json:
        abouts = {name: profile.about for name, profile in PROFILES.items()}
        print_json({"profiles": abouts, "netem": netem.value, "netem_reason": netem.reason})
        return
    width = max(map(len, PROFILES))
    for name, profile in PROFILES.items():
        typer.echo(f"{name:{width}}  {profile.about}")
    typer.echo(f"\nThe emulation is a proxy and needs no netem. Here: {netem.reason}.")
