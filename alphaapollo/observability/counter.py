"""Show the progress of a long loop: a bar in a terminal, otherwise a line every ten percent."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from alphaapollo.observability.terminal import Terminal

LINES = 10  # number of lines printed without a terminal


class LoopProgressBar:
    """Progress display of a loop: `with LoopProgressBar("prompts", total=80) as counter: counter.advance("text")`.

    label: plural noun of the counted items. done: number of items that were complete before the loop.
    """

    def __init__(self, label: str, total: int, done: int = 0, terminal: Terminal | None = None):
        self._label, self._total, self._done = label, total, done
        self._terminal = terminal or Terminal(highlight=False)
        self._bar: Progress | None = None

    def __enter__(self) -> LoopProgressBar:
        if self._terminal.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn(self._label), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=self._terminal)
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, text: str) -> None:
        """Count one more item. text: shown after the progress."""
        before, self._done = self._done, self._done + 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=text)
        elif self._done == self._total or before * LINES // self._total < self._done * LINES // self._total:
            line = f"{self._done}/{self._total} {self._label}   {text}"
            self._terminal.print(line.rstrip(), soft_wrap=True, markup=False)
