"""The entry point `python -m node`, which is `skipstone`: the commands of `node`, and those of a checkout's `lab`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import typer

from node.cli.app import app, main
from node.doctor.doctor import doctor
from swarm.vocabulary.errors import ConfigError

CHECKOUT: Final = Path(__file__).parent.parent
LABORATORY: Final = {
    "check": "Check the event logs of a run: every microbatch exactly once, one anchor a round.",
    "wan": "Run a local swarm behind slow, far or faulty links.",
    "chaos": "Break a local swarm on purpose and judge what it makes of that.",
    "simulate": "Train in virtual time on a swarm that a file describes, and count what it completes.",
}


def experiment(context: typer.Context) -> None:
    """Runs a command of `lab`, which is beside `node` in a checkout and in no installation."""
    if not (CHECKOUT / "lab" / "__init__.py").is_file():
        raise ConfigError(
            f"`skipstone {context.info_name}` needs a checkout of Skipstone",
            hint="Clone the repository and install it with `pip install -e .`.",
        )
    sys.path.append(str(CHECKOUT))  # an editable install names the packages of the wheel only
    from lab.commands import app as laboratory

    arguments = [str(context.info_name), *context.args]
    raise typer.Exit(laboratory(arguments, prog_name="skipstone", standalone_mode=False) or 0)


app.command()(doctor)
for name, purpose in LABORATORY.items():
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, help=purpose, context_settings=settings, add_help_option=False)(experiment)

if __name__ == "__main__":
    main()
