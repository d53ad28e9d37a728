"""The progress bar of a download on a terminal.

It stands alone because it needs a terminal's library, which commands load only when they show something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from swarm.vocabulary.types import ModuleId


@contextmanager
def download_bar(*, silent: bool) -> Iterator[Callable[[ModuleId, int, int], None]]:
    """Shows a progress bar; yields what takes the progress: the module that is being fetched, bytes here, bytes in all.

    The bar is on standard error, and only when that is a terminal; it comes with the first progress.
    """
    console = Console(stderr=True)
    columns = (TextColumn("module {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=silent or not console.is_terminal
    ) as progress:
        bar = progress.add_task("", visible=False)

        def show(module: ModuleId, done: int, total: int) -> None:
            progress.update(bar, description=str(module), completed=done, total=total, visible=True)

        yield show
