"""`skipstone check`: the audit of a run's event logs.

It stands alone because each command is a module of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.views.output import announce, print_json
from node.cli.views.text import harmless

if TYPE_CHECKING:
    from lab.audit import Report

SHOWN = 20


def check(
    folder: Annotated[Path, typer.Argument(metavar="LOGDIR", help="The folder named by --log-dir.")],
    json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON object.")] = False,
) -> None:
    """Check the event logs of a run: every microbatch exactly once, one anchor a round. Exits with 1 if not."""
    announce(f"skipstone check: reading {folder}", as_json=json)
    from lab.audit import check_folder

    report = check_folder(folder)
    if json:
        print_json(report.as_json())
    else:
        _show(report)
    raise typer.Exit(1 if report.violations else 0)


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(f"{report.logs} logs, {report.ended_well} with a clean end, {report.torn} with a torn last line")
    table = Table("what", "how many")
    for what, number in sorted(report.counts.items()):
        table.add_row(what.replace("_", " "), str(number))
    for module, number in report.by_route.get("modules", {}).items():
        table.add_row(f"visits of module {harmless(module, 12)}", str(number))
    for route in report.by_route.get("routes", ()):
        path = " ".join(f"{stage}.{expert}" for stage, expert in enumerate(route["experts"], start=1))
        table.add_row(f"route {path}: completed, rerouted", f"{route['completed']}, {route['rerouted']}")
    table.add_row("violations", str(len(report.violations)))
    console.print(table)
    for violation in report.violations[:SHOWN]:
        where = "" if violation.spot is None else f"{violation.spot}: "
        console.print(f"{harmless(where)}{violation.rule}: {harmless(violation.message, 1000)}", soft_wrap=True)
    if len(report.violations) > SHOWN:
        console.print(f"... and {len(report.violations) - SHOWN} more (--json lists them all)")
