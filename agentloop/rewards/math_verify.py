"""Answers of mathematics against the right one, by math-verify. Needs the extra `tasks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentloop.rewards.processes import JudgeProcesses
from agentloop.rewards.rows import TRUTH_COLUMNS, truth
from agentloop.trajectory.state import RolloutState


class MathVerifyReward:
    """1.0 where the response ends in an expression that equals the row's right answer, else 0.0.

    The reward map also has `answer`, the text of that expression; `overran` where judging had to
    be ended.
    """

    def __init__(
        self,
        *,
        columns: Sequence[str] = TRUTH_COLUMNS,
        timeout_s: float = 10.0,
        overrun_score: float | None = 0.0,
        strict: bool = True,
        tail_chars: int = 20_000,
        processes: int = 2,
        memory_bytes: int = 2 << 30,
    ) -> None:
        """
        Args:
            columns: Where rows keep the right answer; the first that a row has.
            timeout_s: Of one answer.
            overrun_score: The score of an answer that cannot be judged in its time; None: that is
                an error, and the session has no reward.
            strict: Whether the names of variables count, and sets differ from tuples.
            tail_chars: How much of the end of a response is looked at.
            processes: How many answers are judged at once.
            memory_bytes: Address space of one process.
        """
        self._columns = tuple(columns)
        self._timeout_s = timeout_s
        self._overrun_score = overrun_score
        self._strict = strict
        self._tail_chars = tail_chars
        self._processes = JudgeProcesses(
            "math_verify", processes=processes, memory_bytes=memory_bytes
        )

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        questions = [
            {
                "truth": truth(state.row, self._columns),
                "response": (state.response or "")[-self._tail_chars :],
                "strict": self._strict,
            }
            for state in states
        ]
        return await self._processes.ask_each(
            questions, timeout_s=self._timeout_s, overrun_score=self._overrun_score
        )

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()
