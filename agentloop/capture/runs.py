"""The runs that a capture knows: those under way, and the answers of those that have ended.

Owns how many there may be, which of them are too old, and that what happens to a run is written
down before it counts. Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentloop.capture.journal import Journal
from agentloop.capture.lines import (
    closed_line,
    head_line,
    of_lines,
    outcome_line,
    turn_line,
    verdict_line,
)
from agentloop.capture.refusals import Refusal, conflict
from agentloop.capture.run import Outcome, Run
from agentloop.capture.settings import RunLimits
from agentloop.capture.turn import RefusedTurn, Turn

_BUSY_S = 5.0
"""After how long whoever meets a limit is to come again."""

_JOURNAL_FACTOR = 4
"""By how much a run's journal may be larger than the run in memory, as JSON and base64 are."""


@dataclass(slots=True)
class Counts:
    """What has happened since the process began."""

    started: int = 0
    restored: int = 0
    turns: int = 0
    refused_turns: int = 0
    """Replies that may not be trained on."""
    undone_turns: int = 0
    """Turns whose answer nobody got."""
    late_turns: int = 0
    """Turns that came when their run had ended."""
    repeated_turns: int = 0
    """Requests that were answered with a turn that was there."""
    published_runs: int = 0
    published_trajectories: int = 0
    failed_trajectories: int = 0
    rejected: int = 0
    stale_runs: int = 0
    """Runs whose group was closed before they ended."""
    expired_runs: int = 0
    dropped_runs: int = 0
    refusals: dict[str, int] = field(default_factory=dict[str, int])
    """Requests that were refused, by code."""


class Runs:
    """All runs of a process."""

    def __init__(self, limits: RunLimits, journal: Journal | None = None) -> None:
        self._limits = limits
        self._journal = journal
        self._live: dict[str, Run] = {}
        self._ended: OrderedDict[str, Run] = OrderedDict()
        self._taken: dict[tuple[str, int], str] = {}
        """Which run has which uid and session."""
        self.counts = Counts()

    def restore(self, now_s: float) -> None:
        """Know what the journal knows. A run that cannot be understood is put aside."""
        if self._journal is None:
            return
        limit = _JOURNAL_FACTOR * self._limits.max_run_bytes
        for run_id, ended, lines in self._journal.runs(limit):
            try:
                run = of_lines(lines)
                if run.run_id != run_id or ended != (run.phase == "ended"):
                    raise ValueError("its name is not that of its run")
            except ValueError as error:
                self._journal.put_aside(run_id, str(error))
                continue
            run.touched_s = now_s
            self._taken[(run.identity.uid, run.identity.session_id)] = run_id
            if ended:
                self._remember(run)
            else:
                self._live[run_id] = run
                self.counts.restored += 1

    # -- finding -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._live)

    def __iter__(self) -> Iterator[Run]:
        """Those that have not ended."""
        return iter(list(self._live.values()))

    def find(self, run_id: str) -> Run | None:
        """A run that is known, ended or not."""
        return self._live.get(run_id) or self._ended.get(run_id)

    @property
    def nbytes(self) -> int:
        """What is kept of runs that have not ended."""
        return sum(run.nbytes for run in self._live.values())

    def idle(self, now_s: float) -> list[Run]:
        """Runs of which nothing is under way, and that nobody has asked anything for too long."""
        return [
            run
            for run in self._live.values()
            if run.phase in ("open", "closed")
            and not run.under_way
            and now_s - run.touched_s >= self._limits.idle_s
        ]

    # -- what happens ------------------------------------------------------------------------

    def start(self, run: Run) -> None:
        """Have one more run.

        Raises:
            Refusal: 429: there are too many; 409: its uid and session are another run's.
            OSError: it could not be written down, and is not there.
        """
        limits = self._limits
        if len(self._live) >= limits.max_runs:
            raise Refusal(
                429, "too_many_runs", f"{len(self._live)} runs have not ended, the most there may "
                "be: end some, or come again", retry_after_s=_BUSY_S,
            )  # fmt: skip
        self.check_room()
        identity = (run.identity.uid, run.identity.session_id)
        if identity in self._taken:
            raise conflict(
                "identity_in_use",
                f"session {identity[1]} of uid {identity[0]!r:.100} is run {self._taken[identity]}",
            )
        self._write(run, head_line(run))
        self._live[run.run_id] = run
        self._taken[identity] = run.run_id
        self.counts.started += 1

    def check_room(self) -> None:
        """Refusal: 429: all runs together hold as much as they may."""
        used = self.nbytes
        if used >= self._limits.max_bytes:
            raise Refusal(
                429, "too_many_bytes", f"all runs together hold {used} bytes of "
                f"{self._limits.max_bytes}: end some, or come again", retry_after_s=_BUSY_S,
            )  # fmt: skip

    def add(self, run: Run, turn: Turn | RefusedTurn) -> None:
        """Write down a turn and have it. OSError: it is not there."""
        self._write(run, turn_line(turn))
        run.add(turn)
        self.counts.turns += 1
        self.counts.refused_turns += isinstance(turn, RefusedTurn)

    def undo(self, run: Run, number: int) -> None:
        """A turn's answer did not reach anybody: it never was."""
        if run.phase == "open" and run.undo(number):
            self._write(run, {"undo": number})
            self.counts.undone_turns += 1

    def judged(self, run: Run) -> None:
        """What was said of a run is to be written down."""
        self._write(run, verdict_line(run.verdict))

    def closed(self, run: Run) -> None:
        """No turn follows; if it is not published, it can still be."""
        self._write(run, closed_line())

    def end(self, run: Run, outcome: Outcome) -> None:
        """It has ended, and this is what whoever asks is answered."""
        self._live.pop(run.run_id, None)
        run.shrink(outcome)
        self._remember(run)
        if self._journal is not None:
            self._journal.end(run.run_id, [head_line(run), outcome_line(outcome)])

    def drop(self, run: Run) -> None:
        """Know nothing of a run any more."""
        self._live.pop(run.run_id, None)
        self._ended.pop(run.run_id, None)
        self._forget(run)

    def shown(self) -> dict[str, Any]:
        """How much there is, for operators."""
        return {"runs": len(self._live), "ended": len(self._ended), "bytes": self.nbytes}

    def close(self) -> None:
        """Let others have the journal."""
        if self._journal is not None:
            self._journal.close()

    def _remember(self, run: Run) -> None:
        self._ended[run.run_id] = run
        while len(self._ended) > self._limits.max_ended:
            _, oldest = self._ended.popitem(last=False)
            self._forget(oldest)

    def _forget(self, run: Run) -> None:
        identity = (run.identity.uid, run.identity.session_id)
        if self._taken.get(identity) == run.run_id:
            del self._taken[identity]
        if self._journal is not None:
            self._journal.forget(run.run_id)

    def _write(self, run: Run, line: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(run.run_id, line)
