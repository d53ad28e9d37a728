"""Options that several commands have, and how a node's are named."""

from __future__ import annotations

from typing import Any, Final

import typer

from node.variables import variable

VisitedPerPath: Final[Any] = typer.Option(
    min=1, help="Train along paths that visit only so many of the stages after stage 0 [default: the manifest's]"
)
StagesPerPath: Final[Any] = typer.Option(
    min=1, help="Run only so many of the stages after stage 0, evenly spread over the depth [default: all]"
)


def setting(name: str, help_text: str, off: str | None = None) -> Any:
    """The option `--name` of a node, which its variable sets as well; a switch with its opposite when `off` is given."""
    declaration = f"--{name}" if off is None else f"--{name}/--{off}"
    return typer.Option(declaration, envvar=variable(name), show_envvar=False, help=help_text)


TextPlace: Final[Any] = setting(
    "text", "Where the run's text lies here; a path in somebody else's manifest is not opened."
)
TokenizerPlace: Final[Any] = setting("tokenizer", "Where the run's tokenizer file lies here; likewise.")
AllowHub: Final[Any] = setting("allow-hub", "May fetch the run's text from the Hugging Face hub.")
