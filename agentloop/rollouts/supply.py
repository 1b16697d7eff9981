"""Which prompts come next, over restarts too. No I/O.

Owns the cursor of several tasks: a prompt counts as done once nothing of it is in the plane any
more. A cursor that is saved while prompts wait to be trained brings these again, and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from agentloop.datasets import PromptRow, Sampler


class PromptSupply:
    """The prompts of several tasks.

    Example: of 10 prompts drawn, 6 are trained and cleared. A state that is told of the 4 that are
    left has drawn 10, and whoever restores it draws these 4 first, once, and then the eleventh.
    """

    def __init__(self, samplers: Mapping[str, Sampler]) -> None:
        """`samplers` by the names of their tasks."""
        self._samplers = dict(samplers)
        self._unfinished: dict[str, dict[str, int]] = {task: {} for task in samplers}
        """By task: draws that may be in the plane, by uid."""
        self._ahead: set[str] = set()
        """Uids that were found in the plane before they were drawn here: they run already, and
        are passed over when their turn comes."""

    @property
    def unfinished(self) -> int:
        """How many prompts may be in the plane."""
        return sum(map(len, self._unfinished.values())) + len(self._ahead)

    def next_row(self, task: str) -> PromptRow:
        """The next prompt of a task."""
        sampler, unfinished = self._samplers[task], self._unfinished[task]
        row = sampler.next()
        while row.uid in self._ahead:
            self._ahead.remove(row.uid)
            unfinished[row.uid] = row.group_id
            row = sampler.next()
        unfinished[row.uid] = row.group_id
        return row

    def settle(self, there: Collection[str]) -> None:
        """Forget the prompts that were drawn and are not in the plane any more."""
        for task, unfinished in self._unfinished.items():
            self._unfinished[task] = {uid: draw for uid, draw in unfinished.items() if uid in there}

    def found(self, there: Collection[str]) -> None:
        """These prompts are in the plane: they are not to be drawn once more."""
        drawn = {uid for unfinished in self._unfinished.values() for uid in unfinished}
        self._ahead |= set(there) - drawn

    # -- resuming ----------------------------------------------------------------------------

    def state(self, there: Collection[str]) -> dict[str, Any]:
        """Plain data that `restore` goes on from, given the uids of prompts that are in the plane
        and not trained yet."""
        self.settle(there)
        return {
            "tasks": {
                task: sampler.state(self._unfinished[task].values())
                for task, sampler in self._samplers.items()
            },
            "ahead": sorted(self._ahead.difference(there)),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Draw on from where the state was taken.

        Raises:
            ValueError: it is of other tasks or datasets; nothing is changed.
        """
        tasks, ahead = state.get("tasks"), state.get("ahead")
        if not isinstance(tasks, Mapping) or not isinstance(ahead, list):
            raise ValueError("no state of prompts: it has no tasks, or no list of uids `ahead`")
        saved = cast("Mapping[str, Mapping[str, Any]]", tasks)
        if set(saved) != set(self._samplers):
            raise ValueError(
                f"the saved tasks are {', '.join(sorted(saved))}, those here are "
                f"{', '.join(sorted(self._samplers))}: their prompts cannot be continued"
            )
        before = {task: sampler.state() for task, sampler in self._samplers.items()}
        for task, sampler in self._samplers.items():
            try:
                sampler.restore(saved[task])
            except ValueError as error:
                for other, its in before.items():
                    self._samplers[other].restore(its)
                raise ValueError(f"task {task!r}: {error}") from error
        self._unfinished = {task: {} for task in self._samplers}
        self._ahead = set(cast("list[str]", ahead))
