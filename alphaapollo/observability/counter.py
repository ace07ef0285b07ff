"""Progress of a long count: a bar in a terminal, otherwise a line every ten percent."""

from __future__ import annotations

from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from alphaapollo.observability.terminal import Terminal

LINES = 10  # printed without a terminal


class ProgressCounter:
    """`with ProgressCounter("prompts", total=80) as counter: ... counter.advance("accuracy 0.53")`"""

    def __init__(self, what: str, total: int, done: int = 0, terminal: Terminal | None = None):
        self._what, self._total, self._done = what, total, done
        self._terminal = terminal or Terminal(highlight=False)
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressCounter:
        if self._terminal.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn(self._what), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=self._terminal)
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, text: str) -> None:
        """Count one more item. text: shown with the progress."""
        before, self._done = self._done, self._done + 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=text)
        elif self._done == self._total or before * LINES // self._total < self._done * LINES // self._total:
            line = f"{self._done}/{self._total} {self._what}   {text}"
            self._terminal.print(line.rstrip(), soft_wrap=True, markup=False)
