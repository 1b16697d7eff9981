"""From settings to the prompts of a task, as groups that are to be generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentloop.config import TaskConfig
from agentloop.datasets import PromptRow, Sampler, make_dataset
from agentloop.groups.job import GroupJob
from agentloop.loops.chat import ChatTokenizer
from agentloop.production.manager import ManagedTask


def managed(
    config: TaskConfig,
    partition_id: str,
    next_row: Callable[[], PromptRow],
    *,
    greedy: bool = False,
) -> ManagedTask:
    """A task as a manager sees it: its prompts, drawn one after the other."""

    def draw(global_steps: int) -> tuple[GroupJob, Mapping[str, Any] | None]:
        row = next_row()
        job = job_of(row, config, partition_id, global_steps, greedy=greedy)
        return job, row.multi_modal_inputs

    return ManagedTask(
        config.name,
        draw,
        weight=config.weight,
        incomplete=config.incomplete,
        filtered=config.filtered,
    )


def job_of(
    row: PromptRow,
    config: TaskConfig,
    partition_id: str,
    global_steps: int,
    *,
    greedy: bool = False,
) -> GroupJob:
    """The group that a prompt becomes."""
    return GroupJob(
        uid=row.uid,
        partition_id=partition_id,
        task=config.name,
        n=config.n,
        global_steps=global_steps,
        messages=list(row.messages),
        row={**row.row, "tools": row.tools} if row.tools else dict(row.row),
        data_source=row.data_source,
        prompt_ids=row.prompt_ids,
        shared=row.multi_modal_inputs is not None,
        greedy=greedy,
    )


def make_sampler(config: TaskConfig, tokenizer: ChatTokenizer, seed: int, run_id: str) -> Sampler:
    """The prompts of a task in their order."""
    dataset = make_dataset(config.dataset, tokenizer)
    return Sampler(dataset, seed=seed, repeat=config.n, run_id=run_id, name=config.name)
