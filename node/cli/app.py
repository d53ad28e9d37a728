"""The `skipstone` command: its subcommands, errors and exit codes."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from node.cli.export import export
from node.cli.generate import generate
from node.cli.join import join, leave
from node.cli.new import new
from node.cli.solo import solo
from node.cli.status import evaluate, status
from node.cli.tokenize import tokenize
from node.cli.up import up
from node.cli.views.text import harmless
from node.concurrency.task_groups import leaves
from node.observability.version import installed_version
from swarm.vocabulary.errors import SkipstoneError
from swarm.vocabulary.types import PROTOCOL_VERSIONS

_INTERRUPTED = 130
_MAX_MESSAGE_CHARACTERS = 2000


class ErrorReportingGroup(TyperGroup):
    """Turns what a command raises into a message for people and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SkipstoneError as error:
            raise _reported(error, debug=ctx.params["debug"]) from None
        except ExceptionGroup as group:
            only = _only_error(group)
            if only is None:
                raise
            raise _reported(only, debug=ctx.params["debug"]) from None
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


app = typer.Typer(
    cls=ErrorReportingGroup,
    name="skipstone",
    help="Train a language model together, on computers that do not belong together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would take the brackets out of the help
)


@app.callback()
def _settings(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="SKIPSTONE_DEBUG", help="Show where an error comes from.")
    ] = False,
) -> None:
    """Settings of all commands."""


@app.command()
def version() -> None:
    """Print the versions of Skipstone and of its protocol."""
    typer.echo(f"skipstone {installed_version()}, protocol {PROTOCOL_VERSIONS.lowest} to {PROTOCOL_VERSIONS.highest}")


for command in (new, up, join, leave, status, solo):
    app.command()(command)
app.command("eval")(evaluate)
for command in (export, generate, tokenize):
    app.command()(command)


def main() -> None:
    """Entry point of the `skipstone` command."""
    # Taking down an interpreter with torch and grpc costs a second of CPU a node, so the exit is cut short.
    code: str | int | None = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)

    atexit.register(leave)  # the first to be registered is the last to be called
    try:
        app(prog_name="skipstone")
    except SystemExit as end:
        code = end.code or 0
        raise


def _only_error(group: ExceptionGroup[Exception]) -> SkipstoneError | None:
    ours, others = group.split(SkipstoneError)
    first = None if ours is None or others is not None else leaves(ours)[0]
    return first if isinstance(first, SkipstoneError) else None


def _reported(error: SkipstoneError, *, debug: bool) -> typer.Exit:
    if debug:
        traceback.print_exception(error)
    typer.echo(f"error: {harmless(str(error), _MAX_MESSAGE_CHARACTERS)}\n  {error.hint}", err=True)
    return typer.Exit(error.exit_code)
