"""Steps: how far a bench is, on stderr. Draws only when told to, so that it costs a measurement nothing."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REDRAW_SECONDS = 0.1


class Steps:
    """A progress bar of `total` steps; a line of text per step where stderr is no terminal."""

    def __init__(self, title: str, total: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._title = title
        self._total = total
        self._done = 0
        self._drawn = 0.0
        self._text = ""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def step(self, text: str, count: int = 1) -> None:
        """`count` more steps are done, and `text` is what comes now."""
        self._done += count
        changed, self._text = text != self._text, text
        now = time.monotonic()
        if self._console.is_terminal:
            if changed or now - self._drawn >= REDRAW_SECONDS or self._done >= self._total:
                self._drawn = now
                description = f"{self._title}: {text}"
                self._progress.update(self._task, completed=self._done, description=description, refresh=True)
        elif changed:
            self._console.print(f"{self._title}: {text} ({self._done} of {self._total})", soft_wrap=True)
