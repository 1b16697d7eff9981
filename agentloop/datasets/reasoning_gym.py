"""Tasks of reasoning-gym as rows, by name. Needs the extra `tasks`.

Entry i of seed s is entry i-1 of seed s+1, so two seeds are no two sets of questions. What is for
training and what is for evaluation is decided by the question's text.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, cast

from agentloop.datasets.child import child_environment, python_child
from agentloop.datasets.prompt import DatasetError
from agentloop.datasets.split import SPLITS, Split

INSTRUCTION: Final = (
    "Think it over, then give the final answer, and nothing else, between <answer> and </answer>."
)
"""A system prompt for answers that the reward `reasoning_gym` finds."""


class GymRows:
    """Rows of one task, made when this object is, the same for the same arguments."""

    def __init__(
        self,
        task: str,
        *,
        size: int,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        split: Split | None = None,
        eval_share: float = 0.1,
        timeout_s: float = 600.0,
    ) -> None:
        """
        Args:
            task: The task's name, such as `chain_sum`.
            size: How many rows; of the split, if there is one.
            seed: Which questions. Splits stay disjoint over all seeds.
            config: The task's settings.
            split: `train`, `eval`; None: both.
            eval_share: Which share of all questions is for evaluation.
            timeout_s: Of making the rows.

        Raises:
            DatasetError: there is no such task, its settings are wrong, or it has too few
                questions.
        """
        if size < 1 or not 0.0 < eval_share < 1.0 or (split is not None and split not in SPLITS):
            raise DatasetError(
                f"size is at least 1, eval_share between 0 and 1, split one of "
                f"{', '.join(SPLITS)}; got {size}, {eval_share}, {split!r}"
            )
        settings = dict(config or {})
        if "seed" in settings:
            raise DatasetError("the seed of a task goes beside its config, not into it")
        self._task = task
        self._config = settings
        request = {
            "task": task, "size": size, "seed": seed, "config": settings, "split": split,
            "eval_share": eval_share,
        }  # fmt: skip
        self._entries = _made(request, timeout_s)

    def __len__(self) -> int:
        return len(self._entries)

    def row(self, index: int) -> Mapping[str, Any]:
        entry = self._entries[index]
        return {
            "prompt": entry["question"],
            "data_source": self._task,
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "reasoning_gym": {"task": self._task, "config": self._config, "index": entry["index"]},
        }

    def scan(self, without: Collection[str]) -> Iterator[Mapping[str, Any]]:
        return (self.row(index) for index in range(len(self._entries)))

    def where(self, index: int) -> str:
        return f"{self._task}, entry {self._entries[index]['index']}"


def _made(request: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    try:
        ran = subprocess.run(
            python_child("agentloop.datasets.gym_process"),
            input=json.dumps(request).encode(), capture_output=True,
            env=child_environment(), timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DatasetError(
            f"{request['task']!r}: {request['size']} rows were not made in {timeout_s:g} s"
        ) from None
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{request['task']!r}: its config is no plain data: {error}") from error
    lines = [cast(dict[str, Any], json.loads(line)) for line in ran.stdout.splitlines()]
    last = lines.pop() if lines else {}
    if "error" in last:
        raise DatasetError(f"{request['task']!r}: {last['error']}")
    if "done" not in last:
        raise DatasetError(
            f"{request['task']!r}: the process that makes its rows ended with {ran.returncode}: "
            f"{ran.stderr[-500:].decode(errors='replace')}"
        )
    return lines
