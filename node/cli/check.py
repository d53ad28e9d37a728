"""`skipstone check`: do the event logs of a run add up?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.output import announce, print_json
from node.cli.text import harmless
from node.event_lines import MAX_LINE_BYTES
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from node.log_check.findings import Spot
    from node.log_check.report import Report

SHOWN = 20
_NAME = re.compile(r"(?P<life>.+-(?P<began>\d+))(?:\.(?P<part>\d+))?\.jsonl")


def check(
    folder: Annotated[Path, typer.Argument(metavar="LOGDIR", help="The folder named by --log-dir.")],
    json: Annotated[bool, typer.Option("--json", help="The whole report as one JSON object.")] = False,
) -> None:
    """Check the event logs of a run: every microbatch exactly once, one anchor a round. Exits with 1 if not."""
    announce(f"skipstone check: reading {folder}", as_json=json)
    from node.log_check.report import check_logs

    report = check_logs([_lines(parts) for parts in _lives(folder)])
    if json:
        print_json(report.as_json())
    else:
        _show(report)
    raise typer.Exit(1 if report.violations else 0)


def _lives(folder: Path) -> list[list[Path]]:
    """The files of each process, its parts in order; processes in the order of their start.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder", hint="Name the folder that the nodes were given as --log-dir.")
    found: dict[tuple[int, str], list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found.setdefault((int(name["began"]), name["life"]), []).append((int(name["part"] or 1), path))
    return [[path for _, path in sorted(parts)] for _, parts in sorted(found.items())]


def _lines(parts: list[Path]) -> Iterator[tuple[Spot, bytes]]:
    """Line after line, with no more than one in memory. A line that is too long comes in pieces, which are no events."""
    from node.log_check.findings import Spot

    for path in parts:
        try:
            with path.open("rb") as file:
                number = 0
                while line := file.readline(MAX_LINE_BYTES):
                    number += 1
                    yield Spot(path.name, number), line
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(f"{report.logs} logs, {report.ended_well} with a clean end, {report.torn} with a torn last line")
    table = Table("what", "how many")
    for what, number in sorted(report.counts.items()):
        table.add_row(what.replace("_", " "), str(number))
    table.add_row("violations", str(len(report.violations)))
    console.print(table)
    for violation in report.violations[:SHOWN]:
        where = "" if violation.spot is None else f"{violation.spot}: "
        console.print(f"{harmless(where)}{violation.rule}: {harmless(violation.message, 1000)}", soft_wrap=True)
    if len(report.violations) > SHOWN:
        console.print(f"... and {len(report.violations) - SHOWN} more (--json lists them all)")
