"""What a person sees of a run: a live table in a terminal, a line a step elsewhere.

Never a reason for a run to end: a terminal that goes away is written to no more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from trainer.report.step_line import StepLine

_log = logging.getLogger(__name__)

SHOWN_STEPS = 8
"""Steps of the live table."""


class Progress:
    """Shows a run, stretch by stretch (warm-up, training).

    Example:
        with Progress() as progress:
            progress.begin("grpo", 100)
            progress.step(1, values, plane_s=0.01)
    """

    def __init__(self, console: Console | None = None) -> None:
        """`console`: where to; standard output if not given."""
        self._console = console or Console()
        self._label = ""
        self._total: int | None = None
        self._lines: deque[StepLine] = deque(maxlen=SHOWN_STEPS)
        self._bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._live: Live | None = None
        self._gone = False

    def begin(self, label: str, total: int | None = None, *, done: int = 0) -> None:
        """A stretch begins: of `total` steps, of which a run that is resumed has `done` some."""
        self._label, self._total = label, total
        self._show(lambda: self._begin_bar(done))

    def step(self, step: int, values: Mapping[str, float], *, plane_s: float | None = None) -> None:
        """A step is done: its number, its logged values, the seconds that the plane took of it."""
        line = StepLine.of(step, values, total=self._total, plane_s=plane_s)
        self._show(lambda: self._show_step(line))

    def say(self, text: str) -> None:
        """A line of text, which stays."""
        self._show(lambda: self._print(text))

    def close(self) -> None:
        """Leave the table as it is now; repeatable."""
        live, self._live = self._live, None
        if live is not None:
            self._show(live.stop)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin_bar(self, done: int) -> None:
        if not self._console.is_terminal:
            self._print(f"{self._label}: {'?' if self._total is None else self._total} steps")
            return
        if self._live is not None:
            self._live.stop()  # the table of the stretch before stays where it is
            self._lines.clear()
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(self._label, total=self._total, completed=done)
        self._live = Live(self._view(), console=self._console, refresh_per_second=4)
        self._live.start()

    def _show_step(self, line: StepLine) -> None:
        if self._live is None:
            self._print(f"{self._label}  {line}" if self._label else str(line))
            return
        assert self._task is not None
        self._lines.append(line)
        self._bar.update(self._task, completed=line.step)
        self._live.update(self._view())

    def _print(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(Text(text))
        else:  # as it is: neither wrapped to a width nor coloured
            self._console.file.write(text + "\n")
            self._console.file.flush()

    def _view(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in StepLine(0).cells():
            table.add_column(name, justify="right")
        for i, line in enumerate(self._lines, 1):
            last = i == len(self._lines)
            table.add_row(*line.cells().values(), style="bold" if last else "dim")
        return Group(self._bar, table)

    def _show(self, action: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # a pipe that broke, a file that was closed
            self._gone = True
            _log.warning("progress is shown no more: %s", error)
