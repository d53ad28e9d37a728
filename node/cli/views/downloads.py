"""The progress bar of a download on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from swarm.vocabulary.types import ModuleId


@contextmanager
def download_bar(*, silent: bool) -> Iterator[Callable[[ModuleId, int, int], None]]:
    """Shows a progress bar on a terminal; yields its callback: module, bytes here, bytes in all."""
    console = Console(stderr=True)
    columns = (TextColumn("module {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=silent or not console.is_terminal
    ) as progress:
        bar = progress.add_task("", visible=False)

        def show(module: ModuleId, done: int, total: int) -> None:
            progress.update(bar, description=str(module), completed=done, total=total, visible=True)

        yield show
