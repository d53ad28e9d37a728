"""The commands of the laboratory as one application; `node.__main__` runs it."""

from __future__ import annotations

import typer

from lab.commands.chaos import chaos
from lab.commands.check import check
from lab.commands.wan import wan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

for command in (check, wan, chaos):
    app.command()(command)
