"""A progress bar of a rollout, with the rates at which trajectories and tokens come."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agentloop.groups.outcome import GroupOutcome
from agentloop.trajectory.state import Status


class RolloutProgress:
    """A bar on stderr where that is a terminal, and nothing elsewhere. Used as a context.

    Example: 42/64 groups  120.3 trajectories/s  5.1k tokens/s  2 failed  1 filtered
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} groups"),
            TextColumn("{task.fields[rates]}"),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            disable=not (console or Console(stderr=True)).is_terminal,
        )
        self._bar = self._progress.add_task("rollout", total=0, rates="")
        self._began = time.monotonic()
        self._trajectories = 0
        self._tokens = 0
        self._bad: dict[Status, int] = {}

    def __enter__(self) -> RolloutProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, title: str, groups: int) -> None:
        """A step of so many groups begins; the rates begin anew."""
        self._began = time.monotonic()
        self._trajectories = self._tokens = 0
        self._bad = {}
        self._progress.reset(self._bar, description=title, total=groups, rates="")

    def outcome(self, outcome: GroupOutcome) -> None:
        """A group has an outcome."""
        self._trajectories += len(outcome.members)
        self._tokens += sum(member.new_tokens for member in outcome.members)
        if outcome.status is Status.COMPLETED:
            self._progress.advance(self._bar)
        else:
            self._bad[outcome.status] = self._bad.get(outcome.status, 0) + 1
        self._progress.update(self._bar, rates=self.rates())

    def rates(self) -> str:
        """The rates so far, in words."""
        took = max(time.monotonic() - self._began, 1e-9)
        words = [
            f"{self._trajectories / took:.1f} trajectories/s",
            f"{self._tokens / took:.0f} tokens/s",
            *(f"{count} {status}" for status, count in sorted(self._bad.items())),
        ]
        return "  ".join(words)
