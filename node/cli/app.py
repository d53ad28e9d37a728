"""The `skipstone` command: its subcommands, errors and exit codes."""

import atexit
import contextlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from node.cli.generate import export, generate
from node.cli.join import join, leave, limits, pause, resume
from node.cli.new import invite, new
from node.cli.service import service
from node.cli.status import credits, dashboard, evaluate, history, status
from node.cli.up import solo, up
from node.cli.views.text import harmless
from node.concurrency.task_groups import leaves
from node.observability.version import installed_version
from node.web.server import PORT
from swarm.vocabulary.errors import Declined, SkipstoneError
from swarm.vocabulary.types import PROTOCOL_VERSIONS

# `\b` keeps click from filling the lines of a paragraph.
HELP = """Train a language model on other people's computers.

\b
Try it:       skipstone up
Join a run:   skipstone join LINK
Start a run:  skipstone new run.toml, then skipstone join run.toml
"""
RUN, LOOK, USE, LABORATORY = "Run", "Look", "Use the model", "Laboratory"


class ErrorReportingGroup(TyperGroup):
    """Typer group that reports an exception of a command by a message and an exit code, and groups `--help`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))  # the help has no rich markup, so typer would ignore the panels
        limit = formatter.width - width - 6
        for panel in (RUN, LOOK, USE, LABORATORY):
            with formatter.section(panel):
                rows = [(n, c) for n, c in self.commands.items() if getattr(c, "rich_help_panel", None) == panel]
                formatter.write_dl([(name.ljust(width), each.get_short_help_str(limit)) for name, each in rows])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives `--dashboard` without a port the usual one; typer has no options with an optional value."""
        pairs = zip(args, (*args[1:], ""), strict=False)
        given = [f"{a}={PORT}" if a == "--dashboard" and not then.isdecimal() else a for a, then in pairs]
        return super().parse_args(ctx, given)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SkipstoneError as error:
            raise _reported(error, debug=ctx.params["debug"]) from None
        except ExceptionGroup as group:  # task groups wrap the error of one node in a group
            ours = [each for each in leaves(group) if isinstance(each, SkipstoneError)]
            if len(ours) < len(leaves(group)):  # never hide an unknown error behind a known one
                raise
            raise _reported(ours[0], debug=ctx.params["debug"]) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None  # as a shell after SIGINT


app = typer.Typer(
    cls=ErrorReportingGroup,
    name="skipstone",
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # with markup, rich would swallow `[default: ...]`
)


def _version(asked: bool) -> None:
    if asked:
        lowest, highest = PROTOCOL_VERSIONS.lowest, PROTOCOL_VERSIONS.highest
        typer.echo(f"skipstone {installed_version()}, protocol {lowest} to {highest}")
        raise typer.Exit


@app.callback()
def _settings(
    debug: Annotated[bool, typer.Option("--debug", envvar="SKIPSTONE_DEBUG", help="Print tracebacks.")] = False,
    only_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the versions.")
    ] = False,
) -> None:
    """Options of all commands."""


for command in (up, join, leave, pause, resume, limits, new, invite, solo):
    app.command(rich_help_panel=RUN)(command)
app.add_typer(service, name="service", rich_help_panel=RUN)
for command in (status, dashboard, history, credits):
    app.command(rich_help_panel=LOOK)(command)
app.command(rich_help_panel=USE)(generate)
app.command("eval", rich_help_panel=USE)(evaluate)
app.command(rich_help_panel=USE)(export)


def main() -> None:
    """Entry point of the `skipstone` command."""
    code: str | int | None = 1  # tearing down torch and grpc costs about 1 s of CPU per node, so `leave` skips it

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)

    atexit.register(leave)  # registered first, so it runs last
    try:
        app(prog_name="skipstone")
    except SystemExit as end:
        code = end.code or 0
        raise


def _reported(error: SkipstoneError, *, debug: bool) -> typer.Exit:
    if debug:
        traceback.print_exception(error)
    level = "" if isinstance(error, Declined) else "error: "  # the message may quote text from a peer
    typer.echo(f"{level}{harmless(str(error), 2000)}\n  {error.hint}", err=True)
    return typer.Exit(error.exit_code)
