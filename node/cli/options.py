"""Options that several commands have."""

from __future__ import annotations

from typing import Any, Final

import typer

VisitedPerPath: Final[Any] = typer.Option(
    min=1, help="Train along paths that visit only so many of the stages after stage 0 [default: the manifest's]"
)
StagesPerPath: Final[Any] = typer.Option(
    min=1, help="Run only so many of the stages after stage 0, evenly spread over the depth [default: all]"
)
