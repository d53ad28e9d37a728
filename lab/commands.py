"""The commands wan, chaos, check and simulate; `node.__main__` runs them in a checkout."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from lab.simulate import simulate
from node.cli.views.interrupts import STOPPING, Interrupts
from node.cli.views.output import announce, print_json, run_loop
from node.cli.views.text import count, duration, harmless, loss_text, megabytes
from swarm.vocabulary.errors import ConfigError

if TYPE_CHECKING:
    from lab.audit import AuditReport
    from lab.laboratory import Mark
    from lab.outcome import Row
    from lab.report import Result

SHOWN = 20
# Interval of progress rows, in seconds.
SHOWN_EVERY_S = 10.0
MAX_LINE = 1000
NO_NETEM = "the emulation is a proxy and does not use netem"

Ended = TypeVar("Ended")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(simulate)


@app.command()
def wan(
    scenario: Annotated[Path | None, typer.Argument(metavar="SCENARIO", help="TOML file of a scenario.")] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for logs, metrics, plots and report; required.")] = None,
    profile: Annotated[str | None, typer.Option(help="Link profile of all peers [default: the scenario's]")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Then repeat it undisturbed.")] = False,
    profiles: Annotated[bool, typer.Option("--profiles", help="List the link profiles and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Run a local swarm behind slow, distant or faulty links.

    Ctrl-C ends it early and still writes the report. Exits with 1 if the event logs do not add up.
    """
    announce("skipstone wan: link profiles" if profiles else "skipstone wan: reading the scenario", as_json=json)
    if profiles:
        _list_profiles(as_json=json)
        return
    if scenario is None or out is None:
        raise ConfigError("wan needs a scenario and a folder", hint="Run `skipstone wan SCENARIO --out DIR`.")
    from lab.run import Experiment
    from lab.scenario import read_scenario
    from node.data.local_paths import as_written
    from node.data.sources import open_source

    read, text = read_scenario(scenario)
    if profile is not None:
        # The folder keeps the scenario as it ran.
        read, text = read.everywhere(profile), f"# run with --profile {profile}\n{text}"
    data = read.manifest.data
    if data.is_of_files:
        open_source(data, as_written(data).text)  # report a missing folder once, not in every node
    teller = Teller(as_json=json)
    stop = asyncio.Event()
    experiment = Experiment(out, teller.tell, stop)
    result, exit_code = run_loop(until_stopped(experiment.run(read, text, compare=compare), stop, experiment.kill))
    assert result.outcome is not None
    if json:
        print_json(result.as_json())
    else:
        _show_result(result, out)
    raise typer.Exit(exit_code or (1 if result.outcome.report.violations else 0))


@app.command()
def chaos(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCENARIO", help="Names of scenarios, TOML files, or `all`.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for logs and report; required.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the included scenarios and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Inject faults into a local swarm and judge its recovery.

    Exits with 1 if a scenario fails. See docs/lab.md.
    """
    announce("skipstone chaos: reading the scenarios", as_json=json)
    from lab.scenario import find_scenarios, known_scenarios, read_scenario

    if listing:
        known = [read_scenario(path)[0] for path in known_scenarios().values()]
        faults = {each.name: each.chaos.fault for each in known if each.chaos is not None}
        if json:
            print_json({"scenarios": faults})
        else:
            _show_columns(faults)
        return
    if not scenarios or out is None:
        raise ConfigError("chaos needs scenarios and a folder", hint="Run `skipstone chaos all --out DIR`.")
    read = [read_scenario(path) for path in find_scenarios(scenarios)]
    if len({scenario.name for scenario, _ in read}) < len(read):
        raise ConfigError("two scenarios have the same name", hint="Rename one: each needs its own folder.")
    for scenario, _ in read:
        if scenario.chaos is None:
            raise ConfigError(f"{scenario.name} has no [chaos] table", hint="Use `skipstone wan`, or add [chaos].")
    from lab.report import suite_json
    from lab.run import Experiment

    stop = asyncio.Event()
    teller = Teller(as_json=json)
    experiment = Experiment(out, teller.tell, stop)
    done, exit_code = run_loop(until_stopped(experiment.run_suite(read), stop, experiment.kill))
    if json:
        print_json(suite_json(done))
    else:
        passed = sum(each.passed for each in done)
        typer.echo(f"{passed} of {len(done)} passed, {len(read)} requested; see {out / 'report.md'}")
    all_passed = len(done) == len(read) and all(each.passed for each in done)
    raise typer.Exit(exit_code or (0 if all_passed else 1))


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(metavar="LOGDIR", help="Folder with event logs, as given to --log-dir.")],
    json: Annotated[bool, typer.Option("--json", help="Print the whole report as one JSON object.")] = False,
) -> None:
    """Check that a run's event logs add up.

    Every microbatch must count exactly once, and each round have one anchor. Exits with 1 if not.
    """
    announce(f"skipstone check: reading {folder}", as_json=json)
    from lab.audit import check_folder

    report = check_folder(folder)
    if json:
        print_json(report.as_json())
    else:
        _show_check(report)
    raise typer.Exit(1 if report.violations else 0)


async def until_stopped(work: Awaitable[Ended], stop: asyncio.Event, kill: Callable[[], None]) -> tuple[Ended, int]:
    """Awaits `work`, which must end soon after `stop` is set. Returns its result and 128 + the signal, or 0."""
    # `kill` runs inside a signal handler, so it must not touch the loop.
    loop = asyncio.get_running_loop()
    with Interrupts(lambda: loop.call_soon_threadsafe(stop.set), lambda _: kill(), f"\n{STOPPING}") as interrupts:
        return await work, interrupts.exit_code


class Teller:
    """Printer of an experiment's progress, on standard output, or on standard error with --json."""

    def __init__(self, *, as_json: bool) -> None:
        self._stream = sys.stderr if as_json else sys.stdout
        self._shown_at = -SHOWN_EVERY_S
        self._loss: float | None = None

    def tell(self, update: str | Row | Mark) -> None:
        """Prints metrics (`Row`) at most every `SHOWN_EVERY_S`, events (`Mark`) at once, and texts between runs."""
        from lab.outcome import Row

        if isinstance(update, str):
            self._shown_at, self._loss = -SHOWN_EVERY_S, None
            self._write(update)
        elif not isinstance(update, Row):
            self._write(f"  {duration(update.at_s)}  {update.what}")
        else:
            # A row without a step has no loss: show the previous one.
            self._loss = self._loss if update.loss is None else update.loss
            if update.at - self._shown_at >= SHOWN_EVERY_S:
                self._shown_at = update.at
                self._write(self._line(update))

    def _line(self, row: Row) -> str:
        waiting = f"  waiting for {', '.join(row.waiting)}" if row.waiting else ""
        return (
            f"{duration(row.at)}  step {row.step}  loss {loss_text(self._loss)}"
            f"  {count(row.tokens_per_s)} tokens/s  {row.serving} of {row.alive} peers serve"
            f"  {megabytes(sum(row.links.values()))}/s{waiting}"
        )

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader may be gone; the experiment continues
            self._stream.write(harmless(line, MAX_LINE) + "\n")
            self._stream.flush()


def _list_profiles(*, as_json: bool) -> None:
    from lab.emulation.emulation import PROFILES

    abouts = {name: profile.about for name, profile in PROFILES.items()}
    if as_json:
        print_json({"profiles": abouts, "netem": False, "netem_reason": NO_NETEM})
        return
    _show_columns(abouts)


def _show_columns(abouts: dict[str, str]) -> None:
    width = max(map(len, abouts))
    for name, about in abouts.items():
        typer.echo(f"{name:{width}}  {about}")


def _show_result(result: Result, folder: Path) -> None:
    outcome = result.outcome
    assert outcome is not None
    share = "" if outcome.share_of_compute is None else f", {outcome.share_of_compute:.0%} of its compute capacity"
    # Prefer the held-out loss, which does not depend on the last microbatches.
    loss = outcome.loss_last if outcome.held_out_loss is None else outcome.held_out_loss
    held_out = "" if outcome.held_out_loss is None else "held-out "
    typer.echo(
        f"{count(outcome.tokens)} tokens, {count(outcome.tokens_per_s)} tokens/s{share}; {held_out}loss "
        f"{loss_text(loss)}"
    )
    if outcome.loss_ratio is not None:
        typer.echo(f"loss relative to the undisturbed run at equal tokens: {outcome.loss_ratio:.4f}")
    violations = len(outcome.report.violations)
    typer.echo(f"skipstone check: {f'{violations} violations' if violations else 'ok'}")
    if result.why_no_plots is not None:
        typer.echo(result.why_no_plots)
    typer.echo(f"all results are in {folder}; see {folder / 'report.md'}")


def _show_check(report: AuditReport) -> None:
    typer.echo(f"{report.logs} logs, {report.ended_well} with a clean end, {report.torn} with a torn last line")
    rows = {what.replace("_", " "): str(number) for what, number in sorted(report.counts.items())}
    for module, number in report.by_route.get("modules", {}).items():
        rows[f"visits of module {harmless(module, 12)}"] = str(number)
    for route in report.by_route.get("routes", ()):
        path = " ".join(f"{stage}.{expert}" for stage, expert in enumerate(route["experts"], start=1))
        rows[f"route {path}: completed, rerouted"] = f"{route['completed']}, {route['rerouted']}"
    _show_columns({**rows, "violations": str(len(report.violations))})
    for violation in report.violations[:SHOWN]:
        where = "" if violation.spot is None else f"{violation.spot}: "
        typer.echo(f"{harmless(where)}{violation.rule}: {harmless(violation.message, 1000)}")
    if len(report.violations) > SHOWN:
        typer.echo(f"... and {len(report.violations) - SHOWN} more (--json lists them all)")
