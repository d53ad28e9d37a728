"""The progress output of experiments. Standard output stays free for JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from node.cli.views.text import count, duration, harmless, loss_text, megabytes

if TYPE_CHECKING:
    from lab.experiment.metrics import Mark, Row

TOLD_EVERY_S = 10.0
"""Where nobody watches a terminal."""
MAX_LINE = 1000


class Teller:
    """Writes progress: figures are one line that is written over again on a terminal, and a line now and then
    elsewhere.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._stream = sys.stderr if as_json else sys.stdout
        self._told_at = -TOLD_EVERY_S
        self._over = "\r\x1b[K" if self._stream.isatty() else ""
        self._drawn = False
        self._loss: float | None = None

    def tell(self, news: str | Row | Mark) -> None:
        """Shows the news of a run. A text begins another run or ends one."""
        from lab.experiment.metrics import Row

        if isinstance(news, Row):
            self._show(news)
            return
        if isinstance(news, str):
            self._told_at, self._loss = -TOLD_EVERY_S, None
        line = news if isinstance(news, str) else f"  {duration(news.at_s)}  {news.what}"
        self._write(harmless(line, MAX_LINE) + "\n")
        self._drawn = False

    def end(self) -> None:
        """Ends the line, which is left standing."""
        if self._drawn:
            self._write("\n", over=False)

    def _show(self, row: Row) -> None:
        self._loss = self._loss if row.loss is None else row.loss
        if self._stream.isatty():
            self._write(self._line(row))
            self._drawn = True
        elif row.at - self._told_at >= TOLD_EVERY_S:
            self._told_at = row.at
            self._write(self._line(row) + "\n")

    def _line(self, row: Row) -> str:
        waiting = f"  waiting for {', '.join(row.waiting)}" if row.waiting else ""
        return (
            f"{duration(row.at)}  step {row.step}  loss {loss_text(self._loss)}"
            f"  {count(row.tokens_per_s)} tokens/s  {row.serving} of {row.alive} peers serve"
            f"  {megabytes(sum(row.links.values()))}/s{waiting}"
        )

    def _write(self, text: str, *, over: bool = True) -> None:
        try:
            self._stream.write(self._over + text if over else text)
            self._stream.flush()
        except (OSError, ValueError):  # whoever watched has gone; the experiment goes on and writes its report
            self._over = ""
