"""Entry point `python -m node`, with the commands of `lab`."""

# ruff: noqa: E402
import signal

handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the imports without a traceback

from typing import Final

import typer

from node.cli.app import LABORATORY, LOOK, app, main
from node.doctor.doctor import doctor

signal.signal(signal.SIGINT, handler)

EXPERIMENTS: Final = {
    "check": "Check that a run's event logs add up.",
    "wan": "Run a local swarm behind slow, distant or faulty links.",
    "chaos": "Inject faults into a local swarm and judge its recovery.",
    "simulate": "Run a swarm described in a file in virtual time.",
}


def experiment(context: typer.Context) -> None:
    """Runs a command of `lab`."""
    from lab.commands import app as laboratory

    arguments = [str(context.info_name), *context.args]
    raise typer.Exit(laboratory(arguments, prog_name="skipstone", standalone_mode=False) or 0)


app.command(rich_help_panel=LOOK)(doctor)
for name, purpose in EXPERIMENTS.items():
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    panel = LABORATORY
    app.command(name, help=purpose, context_settings=settings, add_help_option=False, rich_help_panel=panel)(experiment)

if __name__ == "__main__":
    main()
