"""`skipstone simulate`: how long would an iteration take on such a swarm, and which paths would its data nodes
choose?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.views.output import announce, print_json
from node.cli.views.text import harmless
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from node.lab.simulation.simulate import Simulated


def simulate(
    instance: Annotated[Path | None, typer.Option(help="A problem: fixed peers, stages and costs, as JSON.")] = None,
    regions: Annotated[Path | None, typer.Option(help="Make up a swarm over the regions in this JSON table.")] = None,
    peers: Annotated[int, typer.Option(min=2, help="Of a made-up swarm.")] = 20,
    stages: Annotated[int, typer.Option(min=2, help="Of a made-up swarm, stage 0 included.")] = 6,
    per_path: Annotated[int, typer.Option("--per-path", min=1, help="Stages besides stage 0 that a path visits.")] = 3,
    spread: Annotated[float, typer.Option(min=1, help="Slowest compute time over fastest, of a made-up swarm.")] = 3.0,
    jitter: Annotated[float, typer.Option(min=0, max=2, help="Lognormal spread of all costs, unknown to all.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of everything made up.")] = 0,
    talk_seconds: Annotated[
        float, typer.Option(min=0, max=86400, help="How long the data nodes have talked before the first iteration.")
    ] = 30.0,
    message_seconds: Annotated[
        float, typer.Option(min=0, max=10, help="A small message takes half to all of this.")
    ] = 0.3,
    lost: Annotated[float, typer.Option(min=0, max=0.9, help="Share of small messages that never arrive.")] = 0.0,
    iterations: Annotated[int, typer.Option(min=1, max=1000, help="One after another; the talk goes on.")] = 1,
    cold: Annotated[bool, typer.Option("--cold", help="No talk at all: nobody has heard of anybody's plans.")] = False,
    central: Annotated[bool, typer.Option("--central", help="One planner that knows all, for comparison.")] = False,
    churn: Annotated[
        float, typer.Option(min=0, max=5, help="Share of the peers that die each minute, and return.")
    ] = 0.0,
    minutes: Annotated[float, typer.Option(min=0.1, max=1440, help="How long to train under churn.")] = 10.0,
    dies: Annotated[
        int | None, typer.Option(min=0, help="This peer dies when the talk has settled: what is lost?")
    ] = None,
    search: Annotated[
        float, typer.Option(min=0, max=86400, help="CPU seconds of a long central search, for comparison.")
    ] = 0.0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the timetable into this picture, and the searched one.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Times and paths as one JSON object.")] = False,
) -> None:
    """Plan and play one iteration of a swarm in virtual time, or minutes of training under churn."""
    announce("skipstone simulate: virtual time", as_json=json)
    if cold and central:
        raise ConfigError("simulate cannot be --cold and --central at once", hint="Name one of them, or none.")
    if search > 0 and (churn > 0 or dies is not None):
        raise ConfigError("simulate cannot --search for a plan under --churn or --dies", hint="Leave one of them out.")
    if (instance is None) == (regions is None):
        raise ConfigError("simulate needs exactly one of --instance and --regions", hint="Name one file.")
    from node.lab.simulation.search_comparison import compare
    from node.lab.simulation.simulate import World, make_instance, read_instance, simulate_churn, simulate_death
    from node.lab.simulation.simulate import simulate as run
    from swarm.simulation.generate import Shape
    from swarm.simulation.iteration import Conduct
    from swarm.simulation.negotiation_world import Network

    if instance is not None:
        problem = read_instance(instance)
    else:
        assert regions is not None
        problem = make_instance(regions, Shape(peers=peers, stages=stages, per_path=per_path, spread=spread), seed)
    network = Network(message_seconds, message_seconds / 2, lost)
    if churn > 0:
        _print_report(simulate_churn(problem, churn, minutes, network, seed), as_json=json)
        return
    conduct = Conduct(cold, talk_seconds, iterations, network)
    if dies is not None:
        _print_report(simulate_death(problem, dies, conduct, seed), as_json=json)
        return
    world = World(jitter, seed)
    simulated = run(problem, conduct, world, central=central)
    beside = compare(simulated, world, search) if search > 0 else None
    if plot is not None:
        from node.lab.simulation.timetable_picture import draw

        searched = {"searched": beside.searched} if beside else {}
        draw(simulated.instance, {"planned": simulated.last, **searched}, plot)
    if json:
        print_json({**simulated.as_json(), **(beside.as_json() if beside else {})})
        return
    _show(simulated)
    if beside:
        typer.echo(beside.sentence())


def _print_report(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    for what, value in report.items():
        typer.echo(
            f"{what.replace('_', ' ')}: {value:.3f}"
            if isinstance(value, float)
            else f"{what.replace('_', ' ')}: {value}"
        )


def _show(simulated: Simulated) -> None:
    from rich.console import Console
    from rich.table import Table

    instance, iteration = simulated.instance, simulated.last
    played, talk = iteration.played, iteration.talk
    table = Table("what", "seconds or number")
    table.add_row("makespan", f"{played.makespan_s:.2f} s")
    table.add_row("lower bound", f"{iteration.bound_s:.2f} s")
    table.add_row("waiting per microbatch", f"{played.waiting_s() / instance.total:.2f} s")
    table.add_row("planning, all data nodes together", f"{iteration.planning_cpu_s * 1e3:.1f} ms CPU")
    table.add_row("talk: messages, offers, trades", f"{talk.messages}, {talk.offers}, {talk.trades}")
    table.add_row("talk: last change of a lane after", f"{talk.settled_s:.1f} s")
    if len(simulated.iterations) > 1:
        makespans = ", ".join(f"{each.played.makespan_s:.2f}" for each in simulated.iterations)
        table.add_row("makespans of all iterations", f"{makespans} s")
    visits = ", ".join(f"{stage}: {count}" for stage, count in sorted(iteration.visits.items()))
    table.add_row("visits per stage", visits)
    console = Console(highlight=False, markup=False)
    console.print(harmless(instance.name))
    console.print(table)
