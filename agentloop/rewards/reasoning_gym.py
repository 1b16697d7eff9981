"""Answers to reasoning-gym's tasks, by the scorer of the task. Needs the extra `tasks`.

What a scorer needs is in the dataset's row: `question`, `answer`, `metadata`, and the task's name
and configuration under `reasoning_gym`, as `agentloop.datasets.reasoning_gym` writes them. Rows of
other origin may have `metadata` as JSON text, and name the task in its `source_dataset`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentloop.rewards.processes import JudgeProcesses
from agentloop.rewards.rows import column
from agentloop.rewards.types import RewardError
from agentloop.trajectory.state import RolloutState


class ReasoningGymReward:
    """What the task's own scorer gives the answer: 0.0 to 1.0 for most tasks.

    The reward map also has `answer`, the text that was scored; None: there was none.
    """

    def __init__(
        self,
        *,
        answer_tag: str | None = "answer",
        task: str | None = None,
        timeout_s: float = 10.0,
        overrun_score: float | None = 0.0,
        processes: int = 2,
        memory_bytes: int = 2 << 30,
    ) -> None:
        """
        Args:
            answer_tag: The answer stands in the last <answer> … </answer> of the response. None:
                the whole response is the answer.
            task: The task of rows that name none.
            timeout_s: Of one answer.
            overrun_score: The score of an answer that cannot be judged in its time; None: that is
                an error, and the session has no reward.
            processes: How many answers are judged at once.
            memory_bytes: Address space of one process.
        """
        self._answer_tag = answer_tag
        self._task = task
        self._timeout_s = timeout_s
        self._overrun_score = overrun_score
        self._processes = JudgeProcesses(
            "reasoning_gym", processes=processes, memory_bytes=memory_bytes
        )

    async def score(self, states: Sequence[RolloutState]) -> list[dict[str, Any]]:
        answers = [self._answer(state.response or "") for state in states]
        questions = [
            {**self._question(state.row), "answer": answer}
            for state, answer in zip(states, answers, strict=True)
        ]
        said = await self._processes.ask_each(
            questions, timeout_s=self._timeout_s, overrun_score=self._overrun_score
        )
        return [{**one, "answer": answer} for one, answer in zip(said, answers, strict=True)]

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()

    def _answer(self, response: str) -> str | None:
        return tagged(response, self._answer_tag) if self._answer_tag else response.strip()

    def _question(self, row: Mapping[str, Any]) -> dict[str, Any]:
        metadata = _map_of(row.get("metadata"))
        task = (
            column(row, "reasoning_gym.task")
            or (metadata or {}).get("source_dataset")
            or self._task
        )
        if not isinstance(task, str) or metadata is None or "answer" not in row:
            raise RewardError(
                "the row is none of reasoning-gym: it needs question, answer, metadata, and the "
                f"task's name; it has {', '.join(row) or 'no columns'}"
            )
        return {
            "task": task,
            "config": column(row, "reasoning_gym.config") or {},
            "entry": {
                "question": row.get("question"), "answer": row["answer"], "metadata": metadata,
            },
        }  # fmt: skip


def tagged(text: str, tag: str) -> str | None:
    """What stands in the last pair of these tags, without the space around it.

    Example: tagged("so <answer> 4 </answer>", "answer") == "4"
    """
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return text[start + len(tag) + 2 : end].strip() if 0 <= start < end else None


def _map_of(metadata: Any) -> dict[str, Any] | None:
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            return None
    return cast(dict[str, Any], metadata) if isinstance(metadata, dict) else None
