"""`skipstone leave`: the request to this machine's node to leave its swarm in good order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.cli.views.interrupts import STOP_LIMIT_S
from node.cli.views.output import announce, print_json, run_loop
from node.context.options import setting


def leave(
    identity: Annotated[Path | None, setting("identity", "The key file that the node was started with.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Ask this machine's node to leave in good order, and wait until it has."""
    announce("skipstone leave: asking the node to leave", as_json=json)
    from node.context.options import default_identity_path
    from node.runtime.leave_socket import ask_to_leave

    path = identity or default_identity_path()
    run_loop(ask_to_leave(path, STOP_LIMIT_S + 5))
    if json:
        print_json({"left": str(path)})
    else:
        typer.echo("it has left")
